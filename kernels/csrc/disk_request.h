// One read or write of the disk queue: remaining bytes, and result.
//
// A queue calls `advance` with the result of each system call until it returns that the request is done. Tickets in
// Python share the request and wait for it.
#pragma once

#include <linux/futex.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace booster {

constexpr int END_OF_FILE = -1;  // in place of an errno; as in disk_io.py
constexpr std::size_t MAX_CALL_BYTES = std::size_t{1} << 30;  // the system's limit per call is 2 GiB less a page

// A waitable flag. It is a futex, as a condition variable can't be destroyed in a forked process if another thread of
// the parent waited for it.
class DoneFlag {
  public:
    bool is_set() const { return value_.load(std::memory_order_acquire) != 0; }

    void set() {
        value_.store(1, std::memory_order_release);
        syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    // Returns whether the flag is set. Returns early after a signal, which the caller has to check for.
    bool wait(double seconds) const {
        const auto whole = static_cast<std::time_t>(seconds);
        const timespec limit{whole, static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
        if (!is_set()) {
            syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, 0, &limit, nullptr, 0);
        }
        return is_set();
    }

  private:
    const std::uint32_t* address() const { return reinterpret_cast<const std::uint32_t*>(&value_); }

    static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t), "a futex is one plain 32-bit word");
    std::atomic<std::uint32_t> value_{0};
};

class Request {
  public:
    Request(bool is_write, int descriptor, std::uintptr_t address, std::size_t num_bytes, std::int64_t offset)
        : is_write(is_write), descriptor(descriptor), address_(address), num_bytes_(num_bytes), offset_(offset) {}

    const bool is_write;
    const int descriptor;

    // Range of the next system call.
    void* next_address() const { return reinterpret_cast<void*>(address_ + num_done_); }
    std::size_t next_length() const { return std::min(num_bytes_ - num_done_, MAX_CALL_BYTES); }
    std::int64_t next_offset() const { return offset_ + static_cast<std::int64_t>(num_done_); }

    bool has_work() const { return num_done_ < num_bytes_ && code_ == 0; }

    // Records the result of a system call (a count or a negative errno); returns whether another call is needed.
    bool advance(std::int64_t result) {
        if (result < 0) {
            code_ = result == -EINTR ? 0 : static_cast<int>(-result);
            return has_work();
        }
        const bool is_short = static_cast<std::size_t>(result) < next_length();
        num_done_ += static_cast<std::size_t>(result);
        if (is_short) {
            code_ = code_of_short(result);
        }
        return has_work();
    }

    // Completes the request early with an errno.
    void fail(int code) { code_ = code; }

    // Wakes the waiters; the queue does not access the memory any more.
    void finish() { is_done_.set(); }

    bool done() const { return is_done_.is_set(); }
    bool wait(double seconds) const { return is_done_.wait(seconds); }
    int code() const { return code_; }
    std::size_t num_done() const { return num_done_; }

  private:
    int code_of_short(std::int64_t count) const {
        if (is_write) {
            return count > 0 ? 0 : EIO;  // the file system wrote nothing without an error
        }
        return count == 0 || is_at_end() ? END_OF_FILE : 0;
    }

    // The size is checked because continuing a direct read within a block would be an error.
    bool is_at_end() const {
        struct stat status {};
        return fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode) && next_offset() >= status.st_size;
    }

    const std::uintptr_t address_;
    const std::size_t num_bytes_;
    const std::int64_t offset_;
    std::size_t num_done_ = 0;
    int code_ = 0;
    DoneFlag is_done_;
};

}  // namespace booster
