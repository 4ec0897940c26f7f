// The warp-level code of the CUDA kernels as a shared library for a CPU: what attend makes of a
// split, what store writes of a row. The kernels around it (copies, barriers, launches) are not here.
#define WARP_EMULATOR
#define DEV inline
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

#include "common.cu"
#include "instructions.h"
#include "meta.cu"
#include "warp.cu"
#include "rows.cu"

// A history tile's two blocks of one head, token by token, as attend_warp fetches them from any page.
static void fetch_tile(const Args& a, const Segment& s, int head, int tile) {
  for (int i = 0; i < TILE; i++) {
    const int pos = min(max(tile_base(a, tile) + i, a.n_sink), s.hist_end - 1);
    const int slot = a.table[s.row * a.table_stride + pos], to = i % 16;
    const u8* from = a.blocks + ((i64)(slot >> 4) * HK + head) * HB;
    u8* block = shared_memory + i / 16 * HB;
    for (int c = 0; c < D / 32; c++) std::memcpy(block + c * CHUNK + to * 16, from + c * CHUNK + (slot & 15) * 16, 16);
    std::memcpy(block + META + to * META_BYTES, from + META + (slot & 15) * META_BYTES, META_BYTES);
  }
}

static void attend_split(const Args& a, int split, int head, int first_col) {
  static float stash[COLS * D];
  static float2 stash_ml[COLS];
  for (Work work(a, split); work.more();) {
    const Segment s = work.take();
    const int cols = min(COLS, s.q_len * G - first_col);
    const i64 p = partial_at(a, split, s.b, head, first_col);
    const bool windows = s.chunk0 < s.chunk1, history = s.tile0 < s.tile1;
    if (windows || !history) {
      Warp w;
      w.begin(a, s, head, first_col);
      for (int chunk = s.chunk0; chunk < s.chunk1; chunk++) w.window(a, s, head, chunk);
      w.finish();
      if (history) w.save<true>(stash, stash_ml, COLS);
      else w.save<true>(a.o + p * D, a.ml + p, cols);
    }
    if (history) {
      Warp w;
      w.begin(a, s, head, first_col);
      w.begin_history(a, head);
      for (int tile = s.tile0; tile < s.tile1; tile++) {
        __syncwarp();
        if (threadIdx.x == 0) fetch_tile(a, s, head, tile);
        __syncwarp();
        if (tile == s.tile0) visit_tile<HB, true>(w, a, s, 0, tile);
        else visit_tile<HB, false>(w, a, s, 0, tile);
      }
      w.end_history();
      w.finish();
      if (windows) w.absorb(stash, stash_ml);
      w.save<false>(a.o + p * D, a.ml + p, cols);
    }
  }
}

extern "C" void attend(const Args* a, int splits) {
  for (int split = 0; split < splits; split++)
    for (int head = 0; head < HK; head++)
      for (int col = 0; col < a->columns; col += COLS)
        Lanes::instance().run([&] { attend_split(*a, split, head, col); });
}

// rows [n, HK, D] float32, rotated, into `slots` [n]
extern "C" void store(const CodeArgs* a, const float* rows, const i64* slots, int n, bool key) {
  for (int i = 0; i < n; i++)
    for (int head = 0; head < HK; head++)
      Lanes::instance().run([&] {
        Row y;
        for (int k = 0; k < VEC; k++) y.v[k] = rows[((i64)i * HK + head) * D + threadIdx.x * VEC + k];
        if (key) store_codes<true>(*a, head, slots[i], y, a->factor + (i64)head * D * D);
        else store_codes<false>(*a, head, slots[i], y, nullptr);
      });
}
