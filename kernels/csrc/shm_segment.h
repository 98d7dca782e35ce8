// Shared memory segment of the processes of one host: members, progress counters, and slots for data.
//
// Note [Nameless memory]: the memory is an anonymous file (memfd) of the rank that creates it. The others open it as
// /proc/<process>/fd/<number>. So no name can be left behind in /dev/shm, however the processes end, and the size of
// /dev/shm, 64 MiB in many containers, does not limit it. It is allocated completely at creation, so that a host
// without memory fails there and not with a SIGBUS later. It is sealed against truncation.
//
// Layout: the Header, a RankState for each rank, and two slots for each rank, each of a whole number of pages.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace booster {

constexpr int MAX_RANKS = 64;
constexpr int NUM_PARITIES = 2;  // slots of a rank, used alternately
constexpr int NUM_COUNTERS = 4;  // see Note [Steps] in shm_pipeline.h
constexpr uint64_t PAGE_BYTES = 4096;

// Current call of a rank, published for comparison by the others and for messages.
struct CallInfo {
    int64_t operation;
    int64_t number;     // sequence number per kind of operation
    int64_t length;     // elements or bytes
    int64_t type;       // element type; 0 for operations on bytes
    int64_t detail;     // operator of a reduction, source of a broadcast

    bool operator==(const CallInfo& other) const { return std::memcmp(this, &other, sizeof(CallInfo)) == 0; }
};

// On a separate cache line, to avoid false sharing.
struct alignas(64) Counter {
    std::atomic<uint32_t> value;
};

struct alignas(64) RankState {
    std::atomic<uint32_t> num_written;   // steps, for finding ranks that are behind; written by the rank itself only
    std::atomic<uint32_t> num_consumed;
    int64_t process_id;
    cpu_set_t processors;
    struct alignas(64) {
        CallInfo call;
    } at[NUM_PARITIES];
};

struct Header {
    uint64_t key;  // random number that identifies the memory
    uint64_t num_ranks;
    uint64_t slot_bytes;
    alignas(64) std::atomic<uint64_t> abort_reason;  // 0, or the reason of the abort; see Failure
    std::atomic<uint64_t> abort_step;
    alignas(64) std::atomic<uint32_t> num_sleepers;
    Counter written[NUM_COUNTERS];
    Counter consumed[NUM_COUNTERS];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "locks of one process mean nothing to another");

class Segment {
  public:
    // Creates new memory; others may attach until `close_file` is called.
    static Segment create(int num_ranks, uint64_t slot_bytes, uint64_t key) {
        const uint64_t bytes = size_of(num_ranks, slot_bytes);
        const int file = memfd_create("booster-collectives", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (file < 0) fail("memfd_create", errno);
        Segment segment(file);
        if (ftruncate(file, static_cast<off_t>(bytes)) != 0) fail("ftruncate", errno);
        const int full = posix_fallocate(file, 0, static_cast<off_t>(bytes));
        if (full != 0) fail("allocating " + std::to_string(bytes) + " bytes", full);
        if (fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("sealing", errno);
        segment.map(bytes);
        Header* header = new (segment.base_) Header{};
        header->key = key;
        header->num_ranks = static_cast<uint64_t>(num_ranks);
        header->slot_bytes = slot_bytes;
        return segment;
    }

    // Maps memory that another process created.
    static Segment attach(int process_id, int file_number, int num_ranks, uint64_t slot_bytes, uint64_t key) {
        const std::string path = "/proc/" + std::to_string(process_id) + "/fd/" + std::to_string(file_number);
        const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (file < 0) fail("opening " + path, errno);
        Segment segment(file);
        const uint64_t bytes = size_of(num_ranks, slot_bytes);
        struct stat status;
        if (fstat(file, &status) != 0) fail("fstat", errno);
        const int seals = fcntl(file, F_GET_SEALS);
        if (seals < 0 || !(seals & F_SEAL_SHRINK) || static_cast<uint64_t>(status.st_size) != bytes) {
            throw std::runtime_error(path + " is not the memory that was meant");
        }
        segment.map(bytes);
        const Header& header = segment.header();
        const bool is_meant = header.key == key && header.num_ranks == static_cast<uint64_t>(num_ranks) &&
                              header.slot_bytes == slot_bytes;
        if (!is_meant) throw std::runtime_error(path + " is not the memory that was meant");
        segment.close_file();
        return segment;
    }

    Segment(Segment&& other) noexcept : file_(other.file_), base_(other.base_), bytes_(other.bytes_) {
        other.file_ = -1;
        other.base_ = nullptr;
    }
    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    Segment& operator=(Segment&&) = delete;

    ~Segment() {
        close_file();
        unmap();
    }

    int file() const { return file_; }
    bool is_mapped() const { return base_ != nullptr; }
    Header& header() const { return *reinterpret_cast<Header*>(base_); }
    RankState& rank_state(int rank) const {
        return reinterpret_cast<RankState*>(base_ + round_up(sizeof(Header)))[rank];
    }
    int num_ranks() const { return static_cast<int>(header().num_ranks); }
    uint64_t slot_bytes() const { return header().slot_bytes; }

    char* slot(int rank, uint64_t step) const {
        const uint64_t index = static_cast<uint64_t>(rank) * NUM_PARITIES + step % NUM_PARITIES;
        return base_ + slots_offset(num_ranks()) + index * slot_bytes();
    }

    void close_file() {
        if (file_ >= 0) close(file_);
        file_ = -1;
    }

    void unmap() {
        if (base_ != nullptr) munmap(base_, bytes_);
        base_ = nullptr;
    }

  private:
    explicit Segment(int file) : file_(file) {}

    static uint64_t round_up(uint64_t bytes) { return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

    static uint64_t slots_offset(int num_ranks) {
        return round_up(sizeof(Header)) + round_up(sizeof(RankState) * static_cast<uint64_t>(num_ranks));
    }

    static uint64_t size_of(int num_ranks, uint64_t slot_bytes) {
        if (num_ranks < 2 || num_ranks > MAX_RANKS || slot_bytes == 0 || slot_bytes % PAGE_BYTES != 0) {
            throw std::invalid_argument("shared memory for " + std::to_string(num_ranks) + " ranks with slots of " +
                                        std::to_string(slot_bytes) + " bytes");
        }
        return slots_offset(num_ranks) + static_cast<uint64_t>(num_ranks) * NUM_PARITIES * slot_bytes;
    }

    void map(uint64_t bytes) {
        void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        if (base == MAP_FAILED) fail("mmap", errno);
        base_ = static_cast<char*>(base);
        bytes_ = bytes;
    }

    [[noreturn]] static void fail(const std::string& what, int error) {
        throw std::runtime_error(what + ": " + std::strerror(error));
    }

    int file_ = -1;
    char* base_ = nullptr;
    uint64_t bytes_ = 0;
};

}  // namespace booster
