// Splits a job into fixed parts and runs them on threads, for code that runs without the GIL.
//
//     booster::run_parts(num_threads, [&](int part, int num_parts) { ... });
//     booster::parallel_for(num_threads, length, granule, [&](int64_t begin, int64_t end) { ... });
//
// Uses torch's threads if it has any (see openmp_team.h), else a separate pool. Part t always runs on thread t (part 0
// on the caller), so that the same memory is processed by the same core in every call. The function must not throw.
// Only for sources that are compiled for the baseline CPU; see simd.h.
//
// Note [Fork and exit]: workers are detached and never joined, so exit does not block on them. A forked child has none
// of its parent's threads, and possibly a mutex that one of them held. So a pool belongs to one process id, and a child
// ignores its parent's pool and creates a new one.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>

#include "openmp_team.h"

namespace booster {

class ThreadPool {
  public:
    using Job = void (*)(void* context, int part, int num_parts);

    // Returns the pool of this process, created at first use and never destroyed; see Note [Fork and exit].
    static ThreadPool& of_this_process() {
        static std::atomic<ThreadPool*> current{nullptr};
        ThreadPool* pool = current.load(std::memory_order_acquire);
        while (pool == nullptr || pool->process_id_ != getpid()) {
            ThreadPool* fresh = new ThreadPool();
            if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
            delete fresh;  // another thread was first: `pool` is now its pool
        }
        return *pool;
    }

    // Runs all parts and returns when the last one is done. While another thread's job runs, the caller runs its parts
    // serially.
    void run(int num_parts, Job job, void* context) {
        std::unique_lock<std::mutex> one_job(one_job_, std::try_to_lock);
        if (num_parts <= 1 || !one_job.owns_lock()) {
            run_here(0, num_parts, job, context);
            return;
        }
        const int num_helped = 1 + grow(num_parts - 1);
        post(num_parts, num_helped, job, context);
        job(context, 0, num_parts);
        run_here(num_helped, num_parts, job, context);
        wait_for_workers();
    }

  private:
    ThreadPool() : process_id_(getpid()) {}

    static void run_here(int first, int num_parts, Job job, void* context) {
        for (int part = first; part < num_parts; ++part) job(context, part, num_parts);
    }

    // Starts workers until there are `wanted`; returns their number, which is lower if the system refuses threads.
    int grow(int wanted) {
        if (num_workers_ < wanted) {
            // Workers block signals, as a signal delivered to a worker would not wake a sleeping caller.
            sigset_t all, previous;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &previous);
            try {
                while (num_workers_ < wanted) {
                    std::thread(&ThreadPool::work, this, num_workers_ + 1, job_number_).detach();
                    ++num_workers_;
                }
            } catch (const std::system_error&) {
                // No more threads: the caller runs the remaining parts.
            }
            pthread_sigmask(SIG_SETMASK, &previous, nullptr);
        }
        return num_workers_ < wanted ? num_workers_ : wanted;
    }

    void post(int num_parts, int num_helped, Job job, void* context) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            context_ = context;
            num_parts_ = num_parts;
            num_helped_ = num_helped;
            num_running_ = num_helped - 1;
            std::fegetenv(&floating_point_);
            ++job_number_;
        }
        has_job_.notify_all();
    }

    void wait_for_workers() {
        std::unique_lock<std::mutex> lock(mutex_);
        is_done_.wait(lock, [this] { return num_running_ == 0; });
    }

    void work(int worker, uint64_t last_job) {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            has_job_.wait(lock, [&] { return job_number_ != last_job; });
            last_job = job_number_;
            if (worker >= num_helped_) continue;
            const Job job = job_;
            void* const context = context_;
            const int num_parts = num_parts_;
            // Flush-to-zero mode of the calling thread.
            std::fesetenv(&floating_point_);
            lock.unlock();
            job(context, worker, num_parts);
            lock.lock();
            if (--num_running_ == 0) is_done_.notify_one();
        }
    }

    const pid_t process_id_;
    std::mutex one_job_;  // held by the caller whose job runs; guards num_workers_
    int num_workers_ = 0;
    std::mutex mutex_;  // guards what follows
    std::condition_variable has_job_;
    std::condition_variable is_done_;
    uint64_t job_number_ = 0;
    Job job_ = nullptr;
    void* context_ = nullptr;
    int num_parts_ = 0;
    int num_helped_ = 0;  // threads of this job: the caller and the first workers
    int num_running_ = 0;
    std::fenv_t floating_point_;
};

// Calls `function(part, num_parts)` for every part, each on its own thread.
template <class Function>
void run_parts(int num_parts, Function&& function) {
    if (num_parts <= 1) {
        function(0, 1);
        return;
    }
    using Stored = typename std::remove_reference<Function>::type;
    const ThreadPool::Job job = [](void* context, int part, int parts) {
        (*static_cast<Stored*>(context))(part, parts);
    };
    void* const context = const_cast<void*>(static_cast<const void*>(&function));
    if (const OpenMpTeam* team = OpenMpTeam::of_torch()) {
        team->run(num_parts, job, context);
    } else {
        ThreadPool::of_this_process().run(num_parts, job, context);
    }
}

// Calls `function(begin, end)` for consecutive ranges of 0..length, one per thread, starting at multiples of `granule`.
template <class Function>
void parallel_for(int num_threads, int64_t length, int64_t granule, Function&& function) {
    const int64_t num_granules = (length + granule - 1) / granule;
    const int num_parts = static_cast<int>(num_granules < num_threads ? num_granules : num_threads);
    if (num_parts <= 0) return;
    run_parts(num_parts, [&](int part, int parts) {
        const int64_t begin = num_granules * part / parts * granule;
        const int64_t end = num_granules * (part + 1) / parts * granule;
        function(begin, end < length ? end : length);
    });
}

}  // namespace booster
