// Thread team of the OpenMP runtime that torch has loaded.
//
// Note [Torch's threads]: torch's threads spin for a moment after each of its operations. Other threads that wake
// meanwhile compete with them for the processors, which costs a tenth of a short step. So a job runs on torch's
// threads, through the GOMP entry point (gcc's runtime, and Intel's and LLVM's for compatibility). It is looked up, not
// linked, as a second runtime would bring a second set of spinning threads. A forked child has none of its parent's
// threads, and gcc's runtime does not detect that, so no team is used there.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <cfenv>

namespace booster {

class OpenMpTeam {
  public:
    using Job = void (*)(void* context, int part, int num_parts);

    // Returns the team of torch's threads, or nullptr if there is none or this process can't use it.
    static const OpenMpTeam* of_torch() {
        static const OpenMpTeam team;
        return team.is_usable() ? &team : nullptr;
    }

    // Runs all parts, part t on thread t if there are that many threads.
    void run(int num_parts, Job job, void* context) const {
        Work work{this, job, context, num_parts, {}};
        std::fegetenv(&work.floating_point);
        parallel_(&run_share, &work, static_cast<unsigned>(num_parts), 0);
    }

  private:
    struct Work {
        const OpenMpTeam* team;
        Job job;
        void* context;
        int num_parts;
        std::fenv_t floating_point;
    };

    OpenMpTeam() : process_id_(getpid()) {
        parallel_ = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
        thread_number_ = reinterpret_cast<Count>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
        num_threads_ = reinterpret_cast<Count>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
    }

    bool is_usable() const {
        return parallel_ != nullptr && thread_number_ != nullptr && num_threads_ != nullptr && process_id_ == getpid();
    }

    static void run_share(void* data) {
        const Work& work = *static_cast<const Work*>(data);
        std::fenv_t own;
        std::fegetenv(&own);
        std::fesetenv(&work.floating_point);  // flush-to-zero mode of the calling thread
        const int num_threads = work.team->num_threads_();
        for (int part = work.team->thread_number_(); part < work.num_parts; part += num_threads) {
            work.job(work.context, part, work.num_parts);
        }
        std::fesetenv(&own);
    }

    using Parallel = void (*)(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);
    using Count = int (*)();

    const pid_t process_id_;
    Parallel parallel_ = nullptr;
    Count thread_number_ = nullptr;
    Count num_threads_ = nullptr;
};

}  // namespace booster
