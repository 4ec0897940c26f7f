// The threads of a CTA on one CPU thread. A thread runs until it has to wait for others; then the
// next one runs. Where nobody can go on, the process ends.
#pragma once
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

struct Index { unsigned x, y, z; };
inline Index threadIdx, blockIdx, gridDim;

// All of `expected` threads meet here, again and again.
struct Meeting {
  int expected, arrived = 0;
  unsigned turn = 0;
};

class Block {
 public:
  static constexpr int MOST = 512;

  template <class Body> void run(int threads, Body body) {
    static Body* current;
    current = &body;
    all = {threads};
    for (int i = 0; i < threads; i++) {
      warps[i / 32] = {32};
      done[i] = false;
      getcontext(&thread[i]);
      thread[i].uc_stack = {stack.get() + (size_t)i * STACK, 0, STACK};
      thread[i].uc_link = &caller;
      makecontext(&thread[i], +[] { (*current)(); self().leave(); }, 0);
    }
    for (int left = threads; left;) {
      progress = false;
      for (int i = 0; i < threads; i++) {
        if (done[i]) continue;
        threadIdx.x = i;
        swapcontext(&caller, &thread[i]);
        if (done[i]) left--, progress = true;
      }
      if (!progress) std::fputs("threads of a CTA wait for each other\n", stderr), std::abort();
    }
  }
  void meet(Meeting& m) {
    const unsigned turn = m.turn;
    arrive(m);
    wait([&] { return m.turn != turn; });
  }
  void meet_warp() { meet(warps[threadIdx.x / 32]); }
  void meet_all() { meet(all); }
  template <class Ready> void wait(Ready ready) {
    while (!ready()) swapcontext(&thread[threadIdx.x], &caller);
    progress = true;
  }

  static Block& self() {
    static Block block;
    return block;
  }

 private:
  static constexpr int STACK = 1 << 17;
  void arrive(Meeting& m) {
    if (++m.arrived >= m.expected) m.arrived = 0, m.turn++;
  }
  void leave() {                       // a thread that has ended is not waited for
    done[threadIdx.x] = true;
    all.expected--;
    if (all.arrived && all.arrived >= all.expected) all.arrived = 0, all.turn++;
  }
  std::unique_ptr<char[]> stack{new char[(size_t)MOST * STACK]};
  ucontext_t caller, thread[MOST];
  bool done[MOST], progress;
  Meeting all, warps[MOST / 32];
};
