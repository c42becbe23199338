// Loops on threads that belong to somebody else: torch's own OpenMP threads, through the entry that GCC's compiler
// calls (GOMP_parallel, libgomp's ABI). Between torch's operators a second set of threads would fight with those,
// which spin for a while after each.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace spill {

struct Crew {
  typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
  Parallel parallel;  // null: the caller works alone
  int32_t threads;

  // f(i) for every i below `count`, in any order and on any thread.
  template <class F>
  void each(int64_t count, const F& f) const {
    struct Loop {
      const F* f;
      int64_t count, chunk;
      std::atomic<int64_t> next;
    } loop{&f, count, std::max<int64_t>(1, count / (4 * std::max(threads, 1))), {0}};
    const auto work = [](void* what) {
      Loop& loop = *(Loop*)what;
      for (int64_t from; (from = loop.next.fetch_add(loop.chunk)) < loop.count;)
        for (int64_t i = from; i < std::min(from + loop.chunk, loop.count); i++) (*loop.f)(i);
    };
    if (parallel && threads > 1 && count > 1) parallel(work, &loop, unsigned(threads), 0);
    else work(&loop);
  }
};

}  // namespace spill
