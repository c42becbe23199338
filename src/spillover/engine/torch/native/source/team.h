// Threads that share loops.
//
// The caller works too and waits only for pieces that another thread has begun. A thread that the machine has
// put aside for another process therefore delays nobody: at a barrier, everyone would wait for its next turn.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace spill {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// How many forks lie between the process that loaded the library and this one.
inline std::atomic<int> forks{0};
inline const int forks_are_counted = pthread_atfork(nullptr, nullptr, [] { forks++; });

class Team {
 public:
  explicit Team(int threads) {
    for (int i = 1; i < threads; i++) helpers_.emplace_back([this] { help(); });
  }

  ~Team() {
    stop_ = true;
    publish();
    for (auto& helper : helpers_) helper.join();
  }

  // A forked process has none of the threads. It works alone and must not destroy the team: the helpers that
  // its copy of the condition variable counts as waiting will never leave.
  bool orphaned() const { return forks.load(std::memory_order_relaxed) != forks_; }

  int threads() const { return int(helpers_.size()) + 1; }

  // f(i) for every i below `count`, in any order and on any thread; calls do not nest.
  template <class F>
  void each(int64_t count, const F& f) {
    const int64_t chunk = std::max<int64_t>(1, count / (8 * threads()));
    if (count <= chunk || helpers_.empty() || orphaned()) {
      for (int64_t i = 0; i < count; i++) f(i);
      return;
    }
    const auto some = [](const void* what, int64_t from, int64_t to) {
      for (int64_t i = from; i < to; i++) (*(const F*)what)(i);
    };
    call_.store(some, std::memory_order_relaxed);
    what_.store(&f, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    chunk_.store(chunk, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t loop = publish();
    work(loop);
    const int64_t chunks = (count + chunk - 1) / chunk;
    for (int spins = 0; done_.load(std::memory_order_acquire) < chunks; spins++)
      if (spins < 1000) relax(); else std::this_thread::yield();
    // from here on no ticket of this loop is good, although the next loop is being written down
    ticket_.store(loop << 32 | CLOSED, std::memory_order_release);
  }

 private:
  static constexpr uint64_t CLOSED = 0xFFFFFFFF;

  typedef void (*Call)(const void*, int64_t, int64_t);

  // A new loop: its number is in the upper half of the ticket, the next chunk to take in the lower.
  uint64_t publish() {
    const uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(loop << 32);
    if (asleep_.load()) {
      std::lock_guard<std::mutex> held(mutex_);
      wake_.notify_all();
    }
    return loop;
  }

  // Take chunks of `loop` until none is left. What was read of a loop that has ended meanwhile is not used:
  // its ticket is gone.
  void work(uint64_t loop) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (ticket >> 32 == loop) {
      const Call call = call_.load(std::memory_order_relaxed);
      const void* what = what_.load(std::memory_order_relaxed);
      const int64_t count = count_.load(std::memory_order_relaxed), chunk = chunk_.load(std::memory_order_relaxed);
      const int64_t from = int64_t(ticket & CLOSED) * chunk;
      if ((ticket & CLOSED) == CLOSED || from >= count) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      call(what, from, std::min(from + chunk, count));
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void help() {
    for (uint64_t seen = 0; !stop_;) {
      const uint64_t loop = next(seen);
      if (stop_) return;
      work(loop);
      seen = loop;
    }
  }

  // The number of a loop after `seen`: looked for at once, then between other threads' turns, then asleep.
  uint64_t next(uint64_t seen) {
    for (int spins = 0; spins < 4000; spins++) {
      const uint64_t loop = ticket_.load(std::memory_order_acquire) >> 32;
      if (loop != seen) return loop;
      if (spins < 2000) relax(); else std::this_thread::yield();
    }
    std::unique_lock<std::mutex> held(mutex_);
    asleep_++;
    wake_.wait(held, [&] { return ticket_.load() >> 32 != seen; });
    asleep_--;
    return ticket_.load() >> 32;
  }

  const int forks_ = forks.load();
  std::vector<std::thread> helpers_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> what_{nullptr};
  std::atomic<int64_t> count_{0}, chunk_{1}, done_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace spill
