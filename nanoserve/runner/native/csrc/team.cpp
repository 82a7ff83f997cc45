#include "team.h"

#include <chrono>

namespace ns {

Team::Team(int num_threads) : size_(num_threads < 1 ? 1 : num_threads > kMaxThreads ? kMaxThreads : num_threads) {
    CPU_ZERO(&allowed_);
    if (size_ > 1 && sched_getaffinity(0, sizeof allowed_, &allowed_) == 0 && CPU_COUNT(&allowed_) == size_)
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &allowed_)) cores_.push_back(core);
    for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { work(thread); });
}

Team::~Team() {
    stopping_.store(true, std::memory_order_relaxed);
    ticket_.fetch_add(1, std::memory_order_release);
    ticket_.notify_all();
    for (auto& thread : threads_) thread.join();
}

// Failing (a core went offline, say) is no error: then the kernel decides, as without this.
void Team::stay_on_core(int thread) const {
    if (cores_.empty()) return;
    cpu_set_t core;
    CPU_ZERO(&core);
    CPU_SET(cores_[thread], &core);
    sched_setaffinity(0, sizeof core, &core);
}

void Team::work(int thread) {
    stay_on_core(thread);
    for (uint32_t seen = 0;;) {
        ticket_.wait(seen, std::memory_order_acquire);
        seen = ticket_.load(std::memory_order_acquire);
        if (stopping_.load(std::memory_order_relaxed)) return;
        // In sequentially consistent order either the caller sees this thread inside, or this thread sees the end.
        inside_.fetch_add(1);
        if (open_.load() == seen) {
            begun_.fetch_add(1);
            begun_.notify_all();
            (*body_)(thread);
        }
        inside_.fetch_sub(1);
        inside_.notify_all();
    }
}

void Team::run(const std::function<void(int)>& body, bool everybody) {
    if (size_ == 1) return body(0);
    stay_on_core(0);
    join_run(body, everybody);
    // The caller has other work, too, and may start threads, which inherit where it may run.
    if (!cores_.empty()) sched_setaffinity(0, sizeof allowed_, &allowed_);
}

void Team::join_run(const std::function<void(int)>& body, bool everybody) {
    body_ = &body;
    begun_.store(0);
    uint32_t ticket = ticket_.load(std::memory_order_relaxed) + 1;
    if (ticket == 0) ticket = 1;  // 0 is nobody's
    open_.store(ticket);
    ticket_.store(ticket, std::memory_order_release);
    ticket_.notify_all();
    body(0);
    if (everybody) wait_until(begun_, [this](int begun) { return begun == size_ - 1; });
    open_.store(0);
    wait_until(inside_, [](int inside) { return inside == 0; });  // body lives on the caller's stack
}

void Phases::dawdle() {
    slow_random_ = slow_random_ * 1664525 + 1013904223;
    if (slow_random_ >> 29) return;  // one in eight
    std::this_thread::sleep_for(std::chrono::microseconds(slow_microseconds_));
}

}  // namespace ns
