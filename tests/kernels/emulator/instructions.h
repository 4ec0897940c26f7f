// What common.cu writes in PTX, for the threads of block.h. FP16 windows only. Products of an MMA are
// summed in double: the error of the tensor cores' own sums is not emulated. Copies into shared memory
// arrive at the last moment that the waits allow.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "block.h"

using std::max;
using std::min;

template <class To, class From> To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline u32 __float_as_uint(float x) { return bits<u32>(x); }
inline float __uint_as_float(u32 x) { return bits<float>(x); }
inline float __int_as_float(int x) { return bits<float>(x); }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
template <class T> T __ldg(const T* p) { return *p; }

// ---- all lanes of a warp together: each puts words up, all meet, each reads, all meet again
inline u32 boards[Block::MOST / 32][32][8];
#define board boards[threadIdx.x / 32]
#define LANE (threadIdx.x % 32)
template <class Read> auto exchange(std::initializer_list<u32> mine, Read read) {
  int i = 0;
  for (u32 word : mine) board[LANE][i++] = word;
  Block::self().meet_warp();
  const auto found = read();
  Block::self().meet_warp();
  return found;
}
inline void __syncwarp() { Block::self().meet_warp(); }
inline void __syncthreads() { Block::self().meet_all(); }
template <class T> T __shfl_sync(u32, T x, int from) {
  return bits<T>(exchange({bits<u32>(x)}, [&] { return board[from & 31][0]; }));
}
template <class T> T __shfl_xor_sync(u32 mask, T x, int by) { return __shfl_sync(mask, x, LANE ^ by); }
inline u32 __ballot_sync(u32, bool vote) {
  return exchange({vote}, [] {
    u32 all = 0;
    for (int i = 0; i < 32; i++) all |= board[i][0] << i;
    return all;
  });
}
inline bool __any_sync(u32 mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline u32 __reduce_max_sync(u32, u32 x) {
  return exchange({x}, [] {
    u32 top = 0;
    for (auto& words : board) top = max(top, words[0]);
    return top;
  });
}

// ---- arithmetic
inline int __ffs(u32 x) { return __builtin_ffs(x); }
inline u32 __byte_perm(u32 a, u32 b, u32 select) {
  const u64 from = (u64)b << 32 | a;
  u32 to = 0;
  for (int i = 0; i < 4; i++) {
    const u32 n = select >> 4 * i & 15;
    u32 byte = from >> 8 * (n & 7) & 255;
    if (n & 8) byte = byte & 128 ? 255 : 0;
    to |= byte << 8 * i;
  }
  return to;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __saturatef(float x) { return x > 0 ? min(x, 1.f) : 0.f; }
inline float ex2(float x) { return std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }

inline float half_value(u32 h) { return (float)bits<_Float16>((u16)h); }
template <class T> u32 half_bits(T x) { return bits<u16>((_Float16)x); }
inline u32 pack_half(float lo, float hi) { return half_bits(lo) | half_bits(hi) << 16; }
inline float2 unpack_half(u32 v) { return {half_value(v), half_value(v >> 16)}; }
inline u32 mul_half2(u32 a, u32 b) {
  const float2 x = unpack_half(a), y = unpack_half(b);
  return pack_half(x.x * y.x, x.y * y.y);
}
inline u32 fma_half2(u32 a, u32 b, u32 c) {
  const float2 x = unpack_half(a), y = unpack_half(b), z = unpack_half(c);
  return half_bits((double)x.x * y.x + z.x) | half_bits((double)x.y * y.y + z.y) << 16;
}
inline u32 max_u16x2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
inline u32 pack_window(float lo, float hi) { return pack_half(lo, hi); }
inline float2 unpack_window(u32 v) { return unpack_half(v); }
inline void split_window(float x, float y, u32& hi, u32& lo) {
  hi = pack_window(x, y);
  const float2 r = unpack_window(hi);
  lo = pack_window(x - r.x, y - r.y);
}

// ---- shared memory: addresses are offsets, alignment is checked
alignas(128) inline u8 shared_memory[1 << 18];
inline u32 smem_addr(const void* p) { return (u32)((const u8*)p - shared_memory); }
inline void check_alignment(u64 at, u32 alignment) {
  if (at % alignment) std::fprintf(stderr, "address %llu is not a multiple of %u\n", at, alignment), std::abort();
}
template <class T> T load_shared_as(u32 at, u32 alignment) {
  check_alignment(at, alignment);
  T x;
  std::memcpy(&x, shared_memory + at, sizeof x);
  return x;
}
inline u32 lds32(u32 at) { return load_shared_as<u32>(at, 4); }
inline uint2 lds64(u32 at) { return load_shared_as<uint2>(at, 8); }
inline uint4 lds128(u32 at) { return load_shared_as<uint4>(at, 16); }
inline void store_shared(u32 at, std::initializer_list<u32> words) {
  check_alignment(at, 4 * words.size());
  std::memcpy(shared_memory + at, words.begin(), 4 * words.size());
}
inline void sts64(u32 at, u32 x, u32 y) { store_shared(at, {x, y}); }
inline void sts128(u32 at, u32 x, u32 y, u32 z, u32 w) { store_shared(at, {x, y, z, w}); }

// ---- cp.async: a thread's copies, in groups
struct Copy { u32 to; const void* from; int bytes, group; };
inline std::vector<Copy> copies[Block::MOST];
inline int groups[Block::MOST];
inline void copy_later(u32 to, const void* from, int bytes) {
  check_alignment(to, bytes), check_alignment((u64)from, bytes);
  copies[threadIdx.x].push_back({to, from, bytes, groups[threadIdx.x]});
}
inline void finish_copies(int before) {   // groups below `before`
  auto& mine = copies[threadIdx.x];
  auto finished = [&](const Copy& c) {
    if (c.group < before) std::memcpy(shared_memory + c.to, c.from, c.bytes);
    return c.group < before;
  };
  mine.erase(std::remove_if(mine.begin(), mine.end(), finished), mine.end());
}
inline void copy16(u32 to, const void* from) { copy_later(to, from, 16); }
template <int BYTES> void copy_few(u32 to, const void* from) { copy_later(to, from, BYTES); }
inline void commit_copies() { groups[threadIdx.x]++; }
template <int LEFT> void wait_copies() { finish_copies(groups[threadIdx.x] - LEFT); }
inline void wait_all_copies() { finish_copies(groups[threadIdx.x] + 1); }

// ---- mbarrier: a phase ends when `count` threads have arrived and all bytes that they expect
struct Barrier {
  int count, pending, bytes;
  u32 phase;
  std::vector<Copy> bulk;
  void settle() {
    if (pending || bytes) return;
    for (const Copy& c : bulk) std::memcpy(shared_memory + c.to, c.from, c.bytes);
    bulk.clear();
    pending = count, phase ^= 1;
  }
};
inline std::map<u32, Barrier> barriers;
inline void bar_init(u32 b, int n) { check_alignment(b, 8), barriers[b] = {n, n, 0, 0}; }
inline void bar_init_fence() {}
inline void bar_arrive(u32 b) { barriers[b].pending--, barriers[b].settle(); }
inline void bar_expect(u32 b, int bytes) { barriers[b].bytes += bytes, bar_arrive(b); }
inline void bar_wait(u32 b, u32 parity) {
  Block::self().wait([=] { return barriers[b].phase != parity; });
}
inline void bulk_copy(u32 to, const void* from, int bytes, u32 b) {
  check_alignment(to, 16), check_alignment((u64)from, 16), check_alignment(bytes, 16);
  Barrier& bar = barriers[b];
  bar.bulk.push_back({to, from, bytes, 0});
  bar.bytes -= bytes;
  bar.settle();
}

// ---- what changes no result
inline void prefetch(const void*) {}
inline void wait_previous_kernel() {}
inline void release_next_kernel() {}

// ---- matrices. Lane (g, t) = (lane / 4, lane % 4) holds elements 2t, 2t + 1 of row g of an 8x8 tile.
inline u32 two(u32 first, u32 second) { return (first & 0xFFFF) | second << 16; }
inline void load_matrices(u32 (&r)[4], u32 at, bool transposed) {
  const int g = LANE / 4, t = LANE % 4;
  exchange({at}, [&] {
    for (int i = 0; i < 4; i++) {
      auto element = [&](int row, int col) {
        load_shared_as<uint4>(board[8 * i + row][0], 16);
        return load_shared_as<u16>(board[8 * i + row][0] + 2 * col, 2);
      };
      r[i] = transposed ? two(element(2 * t, g), element(2 * t + 1, g)) : two(element(g, 2 * t), element(g, 2 * t + 1));
    }
    return 0;
  });
}
inline void ldsm(u32 (&r)[4], u32 at) { load_matrices(r, at, false); }
inline void ldsm_t(u32 (&r)[4], u32 at) { load_matrices(r, at, true); }
inline u32 transpose8x8(u32 a) {
  const int g = LANE / 4, t = LANE % 4;
  return exchange({a}, [&] {
    auto element = [&](int row, int col) { return board[4 * row + col / 2][0] >> 16 * (col & 1); };
    return two(element(2 * t, g), element(2 * t + 1, g));
  });
}
// c[16][8] += a[16][16] b[16][8]
inline void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int g = LANE / 4, t = LANE % 4;
  auto a = [](int row, int k) {
    return half_value(board[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)] >> 16 * (k & 1));
  };
  auto b = [](int k, int col) { return half_value(board[4 * col + k % 8 / 2][4 + k / 8] >> 16 * (k & 1)); };
  exchange({a0, a1, a2, a3, b0, b1}, [&] {
    for (int i = 0; i < 4; i++) {
      double sum = c[i];
      for (int k = 0; k < 16; k++) sum += (double)a(g + i / 2 * 8, k) * b(k, 2 * t + i % 2);
      c[i] = (float)sum;
    }
    return 0;
  });
}
inline void mma_from(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  for (int i = 0; i < 4; i++) d[i] = c[i];
  mma(d, a0, a1, a2, a3, b0, b1);
}
inline void mma_window(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma(c, a0, a1, a2, a3, b0, b1);
}
