// The disk queue on io_uring: one thread hands requests to the kernel, which works on many of them at once.
//
// Only that thread touches the ring: no lock around it, and no request ends with the thread that asked for it, as the
// kernel cancels what an ending thread has in flight. Others leave requests in a list and write to an event descriptor,
// which the ring watches beside the requests.
#pragma once

#include "io_uring.h"

#ifdef BOOSTER_HAS_IO_URING

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "disk_request.h"
#include "disk_threads.h"

namespace booster {

class RingQueue {
  public:
    RingQueue()
        : ring_(NUM_ENTRIES),
          news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd"),
          under_way_(MAX_UNDER_WAY) {
        for (std::size_t slot = 0; slot < MAX_UNDER_WAY; ++slot) {
            free_slots_.push_back(slot);
        }
        const SignalsBlocked blocked;  // the new thread inherits it
        thread_ = std::thread([this] { work(); });
    }

    ~RingQueue() { close(); }
    RingQueue(const RingQueue&) = delete;
    RingQueue& operator=(const RingQueue&) = delete;

    void submit(std::shared_ptr<Request> request) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (broken_code_ != 0) {
                request->fail(broken_code_);
                request->finish();
                return;
            }
            waiting_.push_back(std::move(request));
        }
        wake();
    }

    // Waits for all requests, and ends the thread.
    void close() {
        if (!thread_.joinable()) {
            return;
        }
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            is_closing_ = true;
        }
        wake();
        thread_.join();
    }

  private:
    static constexpr unsigned NUM_ENTRIES = 64;
    static constexpr std::size_t MAX_UNDER_WAY = NUM_ENTRIES - 1;  // one entry watches for news
    static constexpr std::uint64_t NEWS = MAX_UNDER_WAY;           // in place of a slot

    void wake() {
        const std::uint64_t one = 1;
        // It can only fail with a full counter, and then the thread has news already.
        [[maybe_unused]] const ssize_t ignored = write(news_.get(), &one, sizeof(one));
    }

    void work() {
        try {
            watch_for_news();
            while (take_requests()) {
                ring_.submit_and_wait();
                ring_.take_completions([this](std::uint64_t slot, std::int64_t result) { take(slot, result); });
            }
        } catch (const std::system_error& error) {
            fail_everything(error.code().value());
        }
    }

    // Moves requests from the list into the ring; returns false once the queue is closing and all of them are done.
    bool take_requests() {
        const std::lock_guard<std::mutex> lock(mutex_);
        while (!waiting_.empty() && !free_slots_.empty()) {
            const std::size_t slot = free_slots_.back();
            free_slots_.pop_back();
            under_way_[slot] = std::move(waiting_.front());
            waiting_.pop_front();
            add(slot);
        }
        return !is_closing_ || free_slots_.size() < MAX_UNDER_WAY;
    }

    void add(std::size_t slot) {
        const Request& request = *under_way_[slot];
        io_uring_sqe entry{};
        entry.opcode = request.is_write ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = request.descriptor;
        entry.addr = reinterpret_cast<std::uintptr_t>(request.next_address());
        entry.len = static_cast<std::uint32_t>(request.next_length());
        entry.off = static_cast<std::uint64_t>(request.next_offset());
        entry.user_data = slot;
        // By one of the kernel's workers. Otherwise what goes through the page cache is copied in this thread, one
        // after another; and a large direct request, which the disk takes in parts only, is begun here, given up and
        // begun again by a worker.
        entry.flags = IOSQE_ASYNC;
        ring_.add(entry);
    }

    void take(std::uint64_t slot, std::int64_t result) {
        if (slot == NEWS) {
            std::uint64_t count = 0;
            [[maybe_unused]] const ssize_t ignored = read(news_.get(), &count, sizeof(count));
            watch_for_news();
            return;
        }
        if (under_way_[slot]->advance(result)) {
            add(slot);
            return;
        }
        under_way_[slot]->finish();
        under_way_[slot].reset();
        free_slots_.push_back(slot);
    }

    // The kernel tells once only, so this is asked for again after each time.
    void watch_for_news() {
        io_uring_sqe entry{};
        entry.opcode = IORING_OP_POLL_ADD;
        entry.fd = news_.get();
        entry.poll_events = POLLIN;
        entry.user_data = NEWS;
        ring_.add(entry);
    }

    // The ring itself doesn't work any more, as when somebody else closed its descriptor.
    void fail_everything(int code) {
        const std::lock_guard<std::mutex> lock(mutex_);
        broken_code_ = code;
        for (std::deque<std::shared_ptr<Request>>* requests : {&under_way_, &waiting_}) {
            for (std::shared_ptr<Request>& request : *requests) {
                if (request) {
                    request->fail(code);
                    std::exchange(request, nullptr)->finish();
                }
            }
        }
        waiting_.clear();
    }

    Ring ring_;
    Descriptor news_;
    std::mutex mutex_;
    std::deque<std::shared_ptr<Request>> waiting_;  // guarded by the mutex, as is what follows
    bool is_closing_ = false;
    int broken_code_ = 0;
    std::deque<std::shared_ptr<Request>> under_way_;  // by slot; the thread's own, as is what follows
    std::vector<std::size_t> free_slots_;
    std::thread thread_;
};

}  // namespace booster

#endif  // BOOSTER_HAS_IO_URING
