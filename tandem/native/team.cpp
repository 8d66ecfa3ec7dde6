#include "team.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tandem {

namespace {

// Waiting threads spin, since a phase takes microseconds and waking takes tens of them. But not for long: where two
// processes share the cores, the one waited for may need this core to go on.
constexpr auto kSpinTime = std::chrono::microseconds(50);
constexpr int kSpinsPerLook = 32;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
}

Team::~Team() {
    stopping_ = true;
    wake();
    for (auto& worker : workers_) worker.join();
}

void Team::run(int phases, const std::function<void(Place&)>& body) {
    if (room_ < phases) {
        constexpr int line = 64 / sizeof(std::atomic<int>);
        stride_ = (size() + line - 1) / line * line;
        phases_ = std::make_unique<Phase[]>(phases);
        taken_ = std::make_unique<std::atomic<int>[]>((size_t)phases * stride_);
        room_ = phases;
    }
    for (int i = 0; i < phases; i++) phases_[i].done.store(0, std::memory_order_relaxed);
    for (int i = 0; i < phases * stride_; i++) taken_[i].store(0, std::memory_order_relaxed);
    body_ = &body;
    inside_.store(kOpen);
    steps_.fetch_add(1);
    wake();
    Place place(*this, 0);
    body(place);
    inside_.fetch_sub(kOpen);
    wait([this] { return inside_.load() == 0; });
}

void Team::work(int index) {
    for (unsigned seen = 0;;) {
        wait([&] { return stopping_.load() || steps_.load() != seen; });
        if (stopping_) return;
        seen = steps_.load();
        if (!enter()) continue;
        Place place(*this, index);
        (*body_)(place);
        if (inside_.fetch_sub(1) == 1) wake();
    }
}

// Into the step, unless it is over.
bool Team::enter() {
    int inside = inside_.load();
    do {
        if (!(inside & kOpen)) return false;
    } while (!inside_.compare_exchange_weak(inside, inside + 1));
    return true;
}

void Team::wake() {
    if (!sleeping_.load()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    woken_.notify_all();
}

void Team::wait(const std::function<bool()>& over) {
    auto end = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < kSpinsPerLook; i++) {
            if (over()) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    woken_.wait(lock, over);
    sleeping_.fetch_sub(1);
}

}  // namespace tandem
