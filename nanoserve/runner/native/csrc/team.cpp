#include "team.h"

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
        (*body_)(thread);
        barrier();
    }
}

void Team::run(const std::function<void(int)>& body) {
    body_ = &body;
    if (size_ > 1) {
        ticket_.fetch_add(1, std::memory_order_release);
        ticket_.notify_all();
    }
    body(0);
    barrier();  // body lives on the caller's stack
}

}  // namespace ns
