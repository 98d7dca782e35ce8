// The disk queue as a thread pool; each thread runs one request at a time with pread and pwrite.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "disk_request.h"

namespace booster {

// Blocks signals in new threads: a signal that is delivered to one would not interrupt a wait of Python's main thread.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &previous_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t previous_;
};

class ThreadedQueue {
  public:
    explicit ThreadedQueue(int num_threads) {
        const SignalsBlocked blocked;  // new threads inherit it
        try {
            for (int index = 0; index < num_threads; ++index) {
                threads_.emplace_back([this] { work(); });
            }
        } catch (const std::system_error&) {  // the thread limit is reached
            close();
            throw;
        }
    }

    ~ThreadedQueue() { close(); }
    ThreadedQueue(const ThreadedQueue&) = delete;
    ThreadedQueue& operator=(const ThreadedQueue&) = delete;

    void submit(std::shared_ptr<Request> request) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            waiting_.push_back(std::move(request));
        }
        has_news_.notify_one();
    }

    // Waits for all requests, and stops the threads.
    void close() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            is_closing_ = true;
        }
        has_news_.notify_all();
        for (std::thread& thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

  private:
    void work() {
        while (const std::shared_ptr<Request> request = next()) {
            while (request->has_work()) {
                request->advance(call_system(*request));
            }
            request->finish();
        }
    }

    // Returns null once the queue is closing and has no more requests.
    std::shared_ptr<Request> next() {
        std::unique_lock<std::mutex> lock(mutex_);
        has_news_.wait(lock, [this] { return is_closing_ || !waiting_.empty(); });
        if (waiting_.empty()) {
            return nullptr;
        }
        std::shared_ptr<Request> request = std::move(waiting_.front());
        waiting_.pop_front();
        return request;
    }

    static std::int64_t call_system(const Request& request) {
        static_assert(sizeof(off_t) == sizeof(std::int64_t), "files may be larger than 2 GiB");
        const ssize_t count =
            request.is_write
                ? pwrite(request.descriptor, request.next_address(), request.next_length(), request.next_offset())
                : pread(request.descriptor, request.next_address(), request.next_length(), request.next_offset());
        return count < 0 ? -errno : count;
    }

    std::mutex mutex_;
    std::condition_variable has_news_;
    std::deque<std::shared_ptr<Request>> waiting_;
    bool is_closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace booster
