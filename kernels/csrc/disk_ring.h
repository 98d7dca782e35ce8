// The disk queue on io_uring: one thread submits requests to the kernel, which runs many of them at once.
//
// Only that thread uses the ring, so the ring needs no lock. And requests survive the thread that issued them, while
// the kernel would cancel the in-flight requests of an exiting thread. Other threads append requests to a list and
// write to an eventfd, which the ring polls along with the requests.
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
          in_flight_(MAX_IN_FLIGHT) {
        for (std::size_t slot = 0; slot < MAX_IN_FLIGHT; ++slot) {
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

    // Waits for all requests, and stops the thread.
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
    static constexpr std::size_t MAX_IN_FLIGHT = NUM_ENTRIES - 1;  // one entry polls the eventfd
    static constexpr std::uint64_t WAKE_UP = MAX_IN_FLIGHT;           // user_data of that entry, in place of a slot

    void wake() {
        const std::uint64_t one = 1;
        // This fails only if the counter is full, and then the eventfd is readable already.
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
            in_flight_[slot] = std::move(waiting_.front());
            waiting_.pop_front();
            add(slot);
        }
        return !is_closing_ || free_slots_.size() < MAX_IN_FLIGHT;
    }

    void add(std::size_t slot) {
        const Request& request = *in_flight_[slot];
        io_uring_sqe entry{};
        entry.opcode = request.is_write ? IORING_OP_WRITE : IORING_OP_READ;
        entry.fd = request.descriptor;
        entry.addr = reinterpret_cast<std::uintptr_t>(request.next_address());
        entry.len = static_cast<std::uint32_t>(request.next_length());
        entry.off = static_cast<std::uint64_t>(request.next_offset());
        entry.user_data = slot;
        // Run by a worker thread of the kernel. Otherwise requests through the page cache would be copied serially in
        // this thread; and a large direct request, which the disk splits, would be started here, abandoned and
        // restarted by a worker.
        entry.flags = IOSQE_ASYNC;
        ring_.add(entry);
    }

    void take(std::uint64_t slot, std::int64_t result) {
        if (slot == WAKE_UP) {
            std::uint64_t count = 0;
            [[maybe_unused]] const ssize_t ignored = read(news_.get(), &count, sizeof(count));
            watch_for_news();
            return;
        }
        if (in_flight_[slot]->advance(result)) {
            add(slot);
            return;
        }
        in_flight_[slot]->finish();
        in_flight_[slot].reset();
        free_slots_.push_back(slot);
    }

    // The poll is one-shot, so it is rearmed after each event.
    void watch_for_news() {
        io_uring_sqe entry{};
        entry.opcode = IORING_OP_POLL_ADD;
        entry.fd = news_.get();
        entry.poll_events = POLLIN;
        entry.user_data = WAKE_UP;
        ring_.add(entry);
    }

    // The ring itself has failed, for example because its descriptor was closed.
    void fail_everything(int code) {
        const std::lock_guard<std::mutex> lock(mutex_);
        broken_code_ = code;
        for (std::deque<std::shared_ptr<Request>>* requests : {&in_flight_, &waiting_}) {
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
    std::deque<std::shared_ptr<Request>> waiting_;  // guarded by the mutex, like the next members
    bool is_closing_ = false;
    int broken_code_ = 0;
    std::deque<std::shared_ptr<Request>> in_flight_;  // by slot; used by the thread only, like the next members
    std::vector<std::size_t> free_slots_;
    std::thread thread_;
};

}  // namespace booster

#endif  // BOOSTER_HAS_IO_URING
