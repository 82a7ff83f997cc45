// A small team of threads that works through one step phase by phase.
//
// OpenMP was the alternative: its idle threads either spin on (taking a core from the api and detok processes) or
// sleep at every barrier (GOMP's passive mode doubled the step time here). This team spins at the end of a phase for a
// moment only, and sleeps on a futex when a wait is long and between steps: no step, no CPU.
//
// A team of as many threads as the process has cores keeps each on a core of its own while it works. Left alone, the
// kernel puts two of them on one core for half a step, time and again, when other processes wake in between. A thread
// whose core another process takes in the middle of an item would hold up all others, so one of them, which has nothing
// to do then, changes places with it.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace ns {

constexpr int kMaxThreads = 64;

// Whether reached(value) came true within about 100 us.
template <class T, class Reached>
bool spin_until(const std::atomic<T>& value, Reached reached) {
    constexpr int kSpins = 4000;
    for (int spins = 0; spins < kSpins; ++spins) {
        if (reached(value.load(std::memory_order_acquire))) return true;
        _mm_pause();
    }
    return false;
}

template <class T, class Reached>
void sleep_until(const std::atomic<T>& value, Reached reached) {
    for (T seen; !reached(seen = value.load(std::memory_order_acquire));) value.wait(seen, std::memory_order_acquire);
}

class Team {
 public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Calls body(thread) on every thread of the team, the caller being thread 0. Not reentrant.
    void run(const std::function<void(int)>& body) { run(body, true); }
    // The same for a body that is whole with any of its threads: returns without those that have not begun when the
    // caller is through, because another process has their core.
    void run_with_whoever_comes(const std::function<void(int)>& body) { run(body, false); }

    // In a body: waits until reached(value), where somebody calls notify_all after a change. Spins about 100 us first,
    // because most waits are short and a sleeper's core has to be woken.
    template <class T, class Reached>
    void wait(int thread, const std::atomic<T>& value, Reached reached) {
        if (spin_until(value, reached)) return;
        members_[thread].computes.store(false, std::memory_order_relaxed);
        change_places(thread);
        sleep_until(value, reached);
        members_[thread].computes.store(true, std::memory_order_relaxed);
    }

 private:
    struct alignas(64) Member {
        std::atomic<pid_t> id{0};           // of the system
        std::atomic<bool> computes{false};  // in a body, and does not wait
    };

    void run(const std::function<void(int)>& body, bool everybody);
    void work(int thread);
    void join_run(const std::function<void(int)>& body, bool everybody);
    void stay_on_core(int thread);
    void change_places(int thread);

    const int size_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<uint32_t> ticket_{0};  // one more per run; threads sleep on it
    alignas(64) std::atomic<uint32_t> open_{0};    // the ticket whose run may be joined; 0: none
    alignas(64) std::atomic<int> inside_{0};       // threads that may be in a body
    std::atomic<int> begun_{0};                    // threads that began this run
    std::atomic<bool> stopping_{false};
    cpu_set_t allowed_;       // the cores of the process when the team was made
    std::vector<int> cores_;  // one per thread, or none: then threads go where the kernel puts them
    std::atomic_flag moving_ = ATOMIC_FLAG_INIT;  // held by who changes cores_ within a run
    Member members_[kMaxThreads];
    std::vector<std::thread> threads_;
};

// Hands the items 0..total-1 of a phase to the team: each thread takes its own contiguous share in order, then helps
// the others.
//
// A phase is over when its items are done, not when all threads are there: a thread whose core another process has
// holds up the team only if it lost it within an item, and then for that item. When it comes back it passes by the
// phases that are over and joins the one that is not. Hence what a thread does in a phase outside of items may touch
// only memory of its own, and may read what later phases write (it gets no item then).
class Phases {
 public:
    explicit Phases(Team& team) : team_(team) {}

    static int share_begin(int total, int thread, int threads) {
        return static_cast<int>(static_cast<int64_t>(total) * thread / threads);
    }

    // Before a run of phases, while no thread of the team is in one.
    void reset() {
        done_.store(0, std::memory_order_relaxed);
        for (int thread = 0; thread < team_.size(); ++thread) {
            locals_[thread] = {};
            cursors_[thread].tagged.store(0, std::memory_order_relaxed);
        }
    }

    // Starts a phase of `total` items: waits until the phase before is complete. False: this one already is, too.
    // Every thread goes through the same phases with the same totals.
    bool begin(int thread, int total) {
        Local& local = locals_[thread];
        const uint32_t before = local.until;
        ++local.phase;
        local.total = total;
        local.until += total;
        help(local, thread);
        const auto reached = [before](uint32_t done) { return done >= before; };
        if (!reached(done_.load(std::memory_order_acquire))) team_.wait(thread, done_, reached);
        return done_.load(std::memory_order_acquire) < local.until;
    }

    // The next item for this thread, or -1. Its items before this one must be finished.
    int claim(int thread) {
        Local& local = locals_[thread];
        if (thread == slow_thread_) dawdle();
        for (int tries = team_.size(); tries > 0; --tries) {
            const int item = take(local);
            if (item >= 0) {
                ++local.taken;
                return item;
            }
            help(local, local.victim + 1 == team_.size() ? 0 : local.victim + 1);
        }
        if (local.taken > 0) {
            const uint32_t done = done_.fetch_add(local.taken, std::memory_order_acq_rel) + local.taken;
            local.taken = 0;
            if (done == local.until) done_.notify_all();  // a system call only if somebody sleeps
        }
        return -1;
    }

    // Whose share the item that claim() returned last is of, and that share.
    struct Share {
        int owner, begin, end;
    };
    Share share_of_claimed(int thread) const {
        const Local& local = locals_[thread];
        return {local.victim, local.share, local.end};
    }

    // The item that claim() will probably return, or -1: for prefetching.
    int peek(int thread) const {
        const Local& local = locals_[thread];
        const int next = next_of(local, cursors_[local.victim].tagged.load(std::memory_order_relaxed));
        return next < local.end ? next : -1;
    }

    // For tests: makes a thread lose its core for some microseconds before some of its items. -1: none.
    void make_slow(int thread, int microseconds) {
        slow_thread_ = thread;
        slow_microseconds_ = microseconds;
    }

 private:
    struct alignas(64) Cursor {
        std::atomic<uint64_t> tagged{0};  // the phase in the upper half, the next item in the lower
    };
    struct alignas(64) Local {
        uint32_t phase = 0;
        uint32_t until = 0;  // done_ when this phase is complete
        int total = 0;
        int victim = 0;             // whose share it works on
        int share = 0, end = 0;     // that share
        int taken = 0;  // items of this phase that are finished but not yet told
    };

    void help(Local& local, int victim) const {
        local.victim = victim;
        local.share = share_begin(local.total, victim, team_.size());
        local.end = share_begin(local.total, victim + 1, team_.size());
    }

    // A cursor of an earlier phase stands at the beginning of this one's share: nobody has to set it up.
    int next_of(const Local& local, uint64_t tagged) const {
        const uint32_t phase = static_cast<uint32_t>(tagged >> 32);
        if (phase == local.phase) return static_cast<int>(tagged & 0xffffffff);
        return phase < local.phase ? local.share : local.end;
    }

    int take(const Local& local) {
        std::atomic<uint64_t>& cursor = cursors_[local.victim].tagged;
        uint64_t seen = cursor.load(std::memory_order_relaxed);
        for (;;) {
            const int next = next_of(local, seen);
            if (next >= local.end) return -1;
            const uint64_t after = static_cast<uint64_t>(local.phase) << 32 | static_cast<uint32_t>(next + 1);
            if (cursor.compare_exchange_weak(seen, after, std::memory_order_relaxed)) return next;
        }
    }

    void dawdle();

    Team& team_;
    int slow_thread_ = -1, slow_microseconds_ = 0;
    uint32_t slow_random_ = 1;
    alignas(64) std::atomic<uint32_t> done_{0};  // items of all phases of this run
    Cursor cursors_[kMaxThreads];
    Local locals_[kMaxThreads];
};

}  // namespace ns
