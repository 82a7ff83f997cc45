#include "team.h"

#include <unistd.h>

#include <chrono>
#include <utility>

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
static bool bind(pid_t id, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return sched_setaffinity(id, sizeof set, &set) == 0;
}

void Team::stay_on_core(int thread) {
    if (cores_.empty()) return;
    members_[thread].id.store(gettid(), std::memory_order_relaxed);
    bind(0, cores_[thread]);
}

// `thread` has waited long for another one, which probably waits for its core itself: gives it its own. If that one was
// only slow, both go on somewhere else, which costs some microseconds.
void Team::change_places(int thread) {
    if (cores_.empty() || moving_.test_and_set(std::memory_order_acquire)) return;
    for (int other = 0; other < size_; ++other)
        if (members_[other].computes.load(std::memory_order_relaxed)) {
            if (!bind(members_[other].id.load(std::memory_order_relaxed), cores_[thread])) break;
            std::swap(cores_[thread], cores_[other]);
            bind(0, cores_[thread]);
            break;
        }
    moving_.clear(std::memory_order_release);
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
            members_[thread].computes.store(true, std::memory_order_relaxed);
            (*body_)(thread);
            members_[thread].computes.store(false, std::memory_order_relaxed);
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
    members_[0].computes.store(true, std::memory_order_relaxed);
    body(0);
    if (everybody) wait(0, begun_, [this](int begun) { return begun == size_ - 1; });
    open_.store(0);
    wait(0, inside_, [](int inside) { return inside == 0; });  // body lives on the caller's stack
    members_[0].computes.store(false, std::memory_order_relaxed);
}

void Phases::dawdle() {
    slow_random_ = slow_random_ * 1664525 + 1013904223;
    if (slow_random_ >> 29) return;  // one in eight
    std::this_thread::sleep_for(std::chrono::microseconds(slow_microseconds_));
}

}  // namespace ns
