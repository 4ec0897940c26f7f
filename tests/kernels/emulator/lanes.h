// 32 lanes of a warp on one CPU thread. A lane runs until it reaches an instruction that all lanes
// execute together; then the next one runs. So every such instruction sees what the others brought,
// and a lane that misses one is found: the warp would end with lanes left over.
#pragma once
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

struct { unsigned x; } threadIdx;

class Lanes {
 public:
  static constexpr int N = 32;

  template <class Body> void run(Body body) {
    static Body* current;
    current = &body;
    for (int i = 0; i < N; i++) {
      done[i] = false;
      getcontext(&lane[i]);
      lane[i].uc_stack = {stack.get() + i * STACK, 0, STACK};
      lane[i].uc_link = &caller;
      makecontext(&lane[i], +[] { (*current)(); instance().done[threadIdx.x] = true; }, 0);
    }
    for (int left = N; left;) {
      left = 0;
      for (int i = 0; i < N; i++) {
        if (done[i]) continue;
        threadIdx.x = i;
        swapcontext(&caller, &lane[i]);
        left += !done[i];
      }
      if (left && left < N) std::fputs("lanes of a warp diverged\n", stderr), std::abort();
    }
  }
  // Wait until all lanes are here.
  void meet() { swapcontext(&lane[threadIdx.x], &caller); }

  static Lanes& instance() {
    static Lanes lanes;
    return lanes;
  }

 private:
  static constexpr int STACK = 1 << 18;
  std::unique_ptr<char[]> stack{new char[N * STACK]};
  ucontext_t caller, lane[N];
  bool done[N];
};
