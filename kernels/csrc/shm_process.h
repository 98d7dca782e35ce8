// Liveness of the process of a rank.
//
// It reads /proc instead of using pidfds, which would need an open file for every peer of every group; the cost is paid
// only by ranks that have waited for a tenth of a second already. A zombie counts as ended. A reused process id is
// detected by the start time.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace booster {

class PeerProcess {
  public:
    PeerProcess() = default;
    explicit PeerProcess(int64_t id) : id_(id), start_time_(look(id).start_time) {}

    bool has_ended() const {
        const Status status = look(id_);
        return !status.runs || status.start_time != start_time_;
    }

  private:
    struct Status {
        bool runs;
        uint64_t start_time;  // since boot, in clock ticks
    };

    // A process whose entry can't be read for lack of descriptors or permissions counts as running, up to the timeout.
    static Status look(int64_t id) {
        char path[64], text[1024];
        std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(id));
        const int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) return {errno != ENOENT && errno != ESRCH, 0};
        const ssize_t length = read(file, text, sizeof text - 1);
        const bool is_gone = length < 0 && errno == ESRCH;
        close(file);
        if (length <= 0) return {!is_gone, 0};
        text[length] = 0;
        return parse(text);
    }

    // "id (name) state ppid ... start_time ...", where the name may hold spaces and parentheses.
    static Status parse(const char* text) {
        const char* at = std::strrchr(text, ')');
        if (at == nullptr || at[1] == 0) return {true, 0};
        at += 2;
        const bool runs = *at != 'Z' && *at != 'X';
        for (int field = 3; field < 22 && at != nullptr; ++field) at = std::strchr(at + 1, ' ');
        return {runs, at == nullptr ? 0 : std::strtoull(at, nullptr, 10)};
    }

    int64_t id_ = 0;
    uint64_t start_time_ = 0;
};

}  // namespace booster
