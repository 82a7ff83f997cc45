// A small team of threads that works through one step phase by phase.
//
// OpenMP was the alternative: its idle threads either spin on (taking a core from the api and detok processes) or
// sleep at every barrier (GOMP's passive mode doubled the step time here). This team spins at a
// barrier for a moment only, and sleeps on a futex when a wait is long and between steps: no step, no CPU.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace ns {

constexpr int kMaxThreads = 64;

class Team {
 public:
    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Calls body(thread) on every thread of the team, the caller being thread 0. Not reentrant.
    void run(const std::function<void(int)>& body);

    // Waits until every thread of the team is here.
    void barrier() {
        if (size_ == 1) return;
        const int mine = generation_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(mine + 1, std::memory_order_release);
            generation_.notify_all();  // a system call only if somebody sleeps
            return;
        }
        for (int spins = 0; spins < kSpins; ++spins) {
            if (generation_.load(std::memory_order_acquire) != mine) return;
            _mm_pause();
        }
        // About 100 us: somebody else has our peer's core. Asleep, we leave ours for the peer to be moved to.
        generation_.wait(mine, std::memory_order_acquire);
    }

 private:
    static constexpr int kSpins = 4000;
    void work(int thread);

    const int size_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> generation_{0};
    alignas(64) std::atomic<uint32_t> ticket_{0};  // one more per run; threads sleep on it
    std::atomic<bool> stopping_{false};
    std::vector<std::thread> threads_;
};

// Hands the items 0..total-1 of a phase to the team: each thread takes its own contiguous share in order, then helps
// the others. A thread that lost its core to another process therefore holds up the team for one item only.
//
// Two sets of cursors alternate, because a fast thread prepares the next phase while a slow one still reads this one.
class Phases {
 public:
    explicit Phases(Team& team) : team_(team) {}

    static int share_begin(int total, int thread, int threads) {
        return static_cast<int>(static_cast<int64_t>(total) * thread / threads);
    }

    // Starts a phase of `total` items: waits for all threads, so that the phase before is complete.
    void begin(int thread, int total) {
        Local& local = locals_[thread];
        local.parity ^= 1;
        Cursor& mine = cursors_[local.parity][thread];
        mine.end = share_begin(total, thread + 1, team_.size());
        mine.next.store(share_begin(total, thread, team_.size()), std::memory_order_relaxed);
        local.victim = thread;
        team_.barrier();
    }

    // The next item for this thread, or -1.
    int claim(int thread) {
        Local& local = locals_[thread];
        for (int tries = team_.size(); tries > 0; --tries) {
            Cursor& cursor = cursors_[local.parity][local.victim];
            if (cursor.next.load(std::memory_order_relaxed) < cursor.end) {
                const int item = cursor.next.fetch_add(1, std::memory_order_relaxed);
                if (item < cursor.end) return item;
            }
            local.victim = local.victim + 1 == team_.size() ? 0 : local.victim + 1;
        }
        return -1;
    }

 private:
    struct alignas(64) Cursor {
        std::atomic<int> next{0};
        int end = 0;
    };
    struct alignas(64) Local {
        int parity = 0;
        int victim = 0;
    };
    Team& team_;
    Cursor cursors_[2][kMaxThreads];
    Local locals_[kMaxThreads];
};

}  // namespace ns
