#include "team.h"

#include <chrono>

namespace ns {

Team::Team(int num_threads) : size_(num_threads < 1 ? 1 : num_threads > kMaxThreads ? kMaxThreads : num_threads) {
    for (int thread = 1; thread < size_; ++thread) threads_.emplace_back([this, thread] { work(thread); });
}

Team::~Team() {
    stopping_.store(true, std::memory_order_relaxed);
    ticket_.fetch_add(1, std::memory_order_release);
    ticket_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void Team::work(int thread) {
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
