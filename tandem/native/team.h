// Threads that work through a step together.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

// A step is a row of phases, a phase a number of tasks. Nobody waits for a thread, only for tasks: one that the system
// has put aside misses phases and finds its way to the present one when it is back, while the others do its share. With
// barriers between the phases a step would last as long as the unluckiest thread, hundreds of times over.
class Team {
  public:
    // One thread's way through a step.
    class Place {
      public:
        // The thread that called run: it is there from the first phase to the last.
        bool caller() const { return index_ == 0; }

        // Tasks 0 .. count - 1 of the next phase; returns when all are done. Every thread must pass the same phases with
        // the same counts. A thread takes its own share first, in order, so that what it reads ahead is what it reads
        // next; then what others have left.
        template <class Task>
        void share(int count, Task&& task) {
            Phase& phase = team_.phases_[phase_];
            std::atomic<int>* taken = &team_.taken_[(size_t)phase_++ * team_.stride_];
            const int threads = team_.size();
            int mine = 0;
            for (int k = 0; k < threads; k++) {
                const int whose = (index_ + k) % threads;
                const int begin = (int)((int64_t)count * whose / threads);
                const int size = (int)((int64_t)count * (whose + 1) / threads) - begin;
                while (taken[whose].load(std::memory_order_relaxed) < size) {
                    int i = taken[whose].fetch_add(1, std::memory_order_relaxed);
                    if (i >= size) break;
                    task(begin + i);
                    mine++;
                }
            }
            if (mine && phase.done.fetch_add(mine) + mine == count) return team_.wake();
            if (phase.done.load(std::memory_order_acquire) < count)
                team_.wait([&] { return phase.done.load() >= count; });
        }

      private:
        friend class Team;
        Place(Team& team, int index) : team_(team), index_(index) {}
        Team& team_;
        int index_;
        int phase_ = 0;
    };

    explicit Team(int threads);
    ~Team();
    Team(const Team&) = delete;

    int size() const { return (int)workers_.size() + 1; }

    // body on every thread that is free, on the caller's in any case; of at most so many phases.
    void run(int phases, const std::function<void(Place&)>& body);

  private:
    struct alignas(64) Phase {
        std::atomic<int> done{0};
    };
    static constexpr int kOpen = 1 << 16;

    void work(int index);
    bool enter();
    void wake();
    void wait(const std::function<bool()>& over);

    std::vector<std::thread> workers_;
    std::unique_ptr<Phase[]> phases_;
    std::unique_ptr<std::atomic<int>[]> taken_;  // tasks of each thread's share, per phase
    int stride_ = 0;                             // of a phase in taken_
    int room_ = 0;
    const std::function<void(Place&)>* body_ = nullptr;

    alignas(64) std::atomic<unsigned> steps_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<int> inside_{0};  // workers in the step; kOpen while others may join
    alignas(64) std::atomic<int> sleeping_{0};
    std::mutex mutex_;
    std::condition_variable woken_;
};

}  // namespace tandem
