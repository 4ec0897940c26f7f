// Split-KV decode attention over sink | 2-bit history | recent. After warp.cu; needs PAGED (1: a
// page holds whole 16-slot blocks), SHARED_BYTES, and either CTA_HEADS, CTA_STAGES, BARRIERS for attend_cta, or WARPS,
// STAGES, MIN_CTAS for attend_warp (cuda_attend.Form).
//
// What makes it fast (README.md has the derivations):
//  - a register of packed codes AND a mask is an MMA operand: two FP16 denormals c * 2^(2p-24) (meta.cu);
//  - codes are the A operand and 8 columns (query token, head) the B operand;
//  - step and lo never touch elements: logits and probabilities are scaled instead;
//  - the soft-max reference moves only when a logit outgrows it by 2^THRESHOLD.

DEV int warp_id() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
template <bool B> struct Flag { static constexpr bool value = B; };
// Ask for the rows of a chunk: its 16 K and V rows of one head, 128 bytes a request.
DEV void prefetch_window(const Args& a, const Segment& s, int head, int chunk) {
  const int lane = threadIdx.x & 31;
  const bool sink = chunk < s.sink_chunks;
  const int from = sink ? 0 : max(a.n_sink, s.hist_end), rows = sink ? a.n_sink : a.n_recent;
  const int end = sink ? min(s.seq_len, a.n_sink) : s.seq_len;
  const int p = min(from + (sink ? chunk : chunk - s.sink_chunks) * WIN + (lane & 15), end - 1);
  const i64 at = (((i64)s.row * rows + (sink ? p : p % rows)) * HK + head) * D;
  const u16* base = lane < 16 ? (sink ? a.sink_k : a.ring_k) : (sink ? a.sink_v : a.ring_v);
  UNROLL for (int i = 0; i < D / 64; i++)
    prefetch(base + at + 64 * i);
}
DEV const u16* page_channels(const Args& a, int slot, int head) {
  return a.channels + ((i64)(slot / PAGE) * HK + head) * 2 * D;
}
// The merge kernel reads R_V next: bring it into L2, a few lines a CTA.
DEV void prefetch_rotation(const Args& a) {
  constexpr int LINES = HK * D * D / 32;
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  for (int i = cta * 32 + (int)threadIdx.x; threadIdx.x < 32 && i < LINES; i += ctas * 32)
    prefetch(a.r_v + (i64)i * 32);
}

// ---------------------------------------------------------------- one CTA per 8 KV heads
// A producer warp brings tiles of all 8 heads (2 bulk copies of 8 * HB bytes, one more of a page's channels); warp w
// works on head w. Best when the batch alone fills the GPU: whole runs of DRAM in order.
#ifdef CTA_HEADS
static_assert(KV_HEADS % CTA_HEADS == 0 && PAGED && 2 * 8 * CTA_STAGES <= BARRIERS, "attend_cta");
extern "C" __global__ __launch_bounds__((CTA_HEADS + 1) * 32, 2) void attend_cta(const __grid_constant__ Args a) {
  constexpr int SUB = CTA_HEADS * HB, STAGE = 2 * SUB + CTA_HEADS * CHANNELS;
  static_assert(SHARED_BYTES == CTA_STAGES * STAGE + BARRIERS + CTA_HEADS * (COLS * (4 * D + 8) + SIDE), "shared memory");
  DYNAMIC_SHARED(u8, smem, 128);
  const int split = blockIdx.x, head0 = blockIdx.y * CTA_HEADS, first_col = blockIdx.z * COLS;
  const int warp = warp_id(), lane = threadIdx.x & 31;
  const u32 buf = smem_addr(smem), full = buf + CTA_STAGES * STAGE, empty = full + CTA_STAGES * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < CTA_STAGES; i++) bar_init(full + i * 8, 1), bar_init(empty + i * 8, CTA_HEADS);
    bar_init_fence();
  }
  __syncthreads();
  release_next_kernel();
  prefetch_rotation(a);
  int st = 0;
  u32 phase = 0;
  if (warp == CTA_HEADS) {                // plan, table and visible history are older than the last kernel
    for (Work work(a, split); work.more();) {
      const Segment s = work.take();
      const int* row = a.table + s.row * a.table_stride;
      // Lanes 0 and 1 look after the two blocks of a tile.
      auto slot_of = [&](int tile) { return __ldg(row + min(tile_base(a, tile) + (lane & 1) * 16, s.hist_end - 1)); };
      int next = s.tile0 < s.tile1 ? slot_of(s.tile0) : 0;
      for (int tile = s.tile0; tile < s.tile1; tile++) {
        const int slot = next;
        if (tile + 1 < s.tile1) next = slot_of(tile + 1);
        const bool page = begins_page(a, tile, tile == s.tile0);
        const u32 to = buf + st * STAGE, bar = full + st * 8;
        bar_wait(empty + st * 8, phase ^ 1);
        if (lane == 0) bar_expect(bar, 2 * SUB + (page ? CTA_HEADS * CHANNELS : 0));
        __syncwarp();
        if (lane < 2) bulk_copy(to + lane * SUB, a.blocks + ((i64)(slot >> 4) * HK + head0) * HB, SUB, bar);
        if (page && lane == 2)
          bulk_copy(to + 2 * SUB, page_channels(a, slot, head0), CTA_HEADS * CHANNELS, bar);
        if (++st == CTA_STAGES) st = 0, phase ^= 1;
      }
    }
    return;
  }
  const int head = head0 + warp;
  float* stash = reinterpret_cast<float*>(smem + CTA_STAGES * STAGE + BARRIERS) + warp * COLS * D;
  float2* stash_ml = reinterpret_cast<float2*>(smem + CTA_STAGES * STAGE + BARRIERS + CTA_HEADS * COLS * D * 4) + warp * COLS;
  const u32 side = buf + CTA_STAGES * STAGE + BARRIERS + CTA_HEADS * COLS * (4 * D + 8) + warp * SIDE;
  bool waited = false;
  for (Work work(a, split); work.more();) {
    const Segment s = work.take();
    for (int chunk = s.chunk0; chunk < s.chunk1; chunk++) prefetch_window(a, s, head, chunk);
    if (!waited) wait_previous_kernel(), waited = true;
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
      w.begin_history(a, head, side);
      auto consume = [&](auto first, int tile) {
        bar_wait(full + st * 8, phase);
        const u32 at = buf + st * STAGE;
        visit_tile<SUB, decltype(first)::value, 1>(w, a, s, at + warp * HB, at + 2 * SUB + warp * CHANNELS, tile);
        __syncwarp();
        if (lane == 0) bar_arrive(empty + st * 8 + w.stage_read(a));
        if (++st == CTA_STAGES) st = 0, phase ^= 1;
      };
      consume(Flag<true>(), s.tile0);
      for (int tile = s.tile0 + 1; tile < s.tile1; tile++) consume(Flag<false>(), tile);
      w.end_history();
      w.finish();
      if (windows) w.absorb(stash, stash_ml);
      w.save<false>(a.o + p * D, a.ml + p, cols);
    }
  }
}
#endif

// ---------------------------------------------------------------- one CTA per KV head
// Every warp has its own pipeline over its share of the tiles; the warps merge at the end. Any
// number of KV heads; with PAGED 0 any page size (16-byte copies, token by token).
#ifdef WARPS
extern "C" __global__ __launch_bounds__(WARPS * 32, MIN_CTAS) void attend_warp(const __grid_constant__ Args a) {
  constexpr int STAGE = 2 * HB;
  static_assert(SHARED_BYTES == WARPS * (STAGES * (STAGE + 8) + COLS * (4 * D + 8) + 2 * CHANNELS + SIDE), "shared memory");
  DYNAMIC_SHARED(u8, smem, 128);
  const int head = blockIdx.x, split = blockIdx.y, first_col = blockIdx.z * COLS;
  const int warp = warp_id(), lane = threadIdx.x & 31;
  const u32 buf = smem_addr(smem) + warp * STAGES * STAGE;
  float* sm_o = reinterpret_cast<float*>(smem + WARPS * STAGES * STAGE);   // [WARPS][COLS][D]
  float2* sm_ml = reinterpret_cast<float2*>(sm_o + WARPS * COLS * D);      // [WARPS][COLS]
  // Channels of two pages: of the one after next nothing is on its way before this one has been entered, because
  // a page has more tiles than the pipeline.
  static_assert(META_FORM != CHANNEL || PAGE / TILE > STAGES - 1, "channels overtaken");
  const u32 channels = smem_addr(sm_ml + WARPS * COLS) + warp * 2 * CHANNELS;
  const u32 side = smem_addr(sm_ml + WARPS * COLS) + warp * SIDE;      // there, too; no codec has both, of one codec or another
#if PAGED
  const u32 full = smem_addr(sm_ml + WARPS * COLS) + WARPS * (2 * CHANNELS + SIDE) + warp * STAGES * 8;
  if (lane == 0) {
    for (int i = 0; i < STAGES; i++) bar_init(full + i * 8, 1);
    bar_init_fence();
  }
  __syncwarp();
#endif
  release_next_kernel();
  prefetch_rotation(a);
  bool waited = false;
  int st = 0, issue_st = 0;
  u32 phase = 0;
  for (Work work(a, split); work.more();) {
    const Segment s = work.take();
    const int* row = a.table + s.row * a.table_stride;
#if META_FORM == CHANNEL
    constexpr int STRIDE = 1;                       // neighbouring tiles share a page's channels
    const int tiles = s.tile1 - s.tile0, tile0 = s.tile0 + tiles * warp / WARPS;
    const int n = s.tile0 + tiles * (warp + 1) / WARPS - tile0;
#else
    constexpr int STRIDE = WARPS;
    const int tile0 = s.tile0 + warp, n = max(0, div_up(s.tile1 - tile0, WARPS));
#endif
    u32 to_channels = channels, at_channels = channels;             // of the next page to come, to be entered
#if PAGED
    auto slot_of = [&](int i) { return __ldg(row + min(tile_base(a, tile0 + i * STRIDE) + (lane & 1) * 16, s.hist_end - 1)); };
    auto issue = [&](int slot, int i, u32 after) {    // after: stage_read of the stage's last tile
      const bool page = begins_page(a, tile0 + i, i == 0);
      const u32 bar = full + issue_st * 8;
      if (lane == 0) bar_expect(bar, STAGE + (page ? CHANNELS : 0));
      __syncwarp();
      if (lane < 2)
        bulk_copy(buf + issue_st * STAGE + lane * HB + after, a.blocks + ((i64)(slot >> 4) * HK + head) * HB, HB, bar);
      if (page) {
        if (lane == 2) bulk_copy(to_channels, page_channels(a, slot, head), CHANNELS, bar);
        to_channels = channels + (to_channels == channels) * CHANNELS;
      }
      if (++issue_st == STAGES) issue_st = 0;
    };
#else
    auto slot_of = [&](int i) {
      return __ldg(row + min(max(tile_base(a, tile0 + i * STRIDE) + lane, a.n_sink), s.hist_end - 1));
    };
    auto issue = [&](int slot, int i, u32 after) {
      const u8* src = a.blocks + ((i64)(slot >> 4) * HK + head) * HB;
      const u32 dst = buf + issue_st * STAGE + (lane >> 4) * HB + after;
      UNROLL for (int c = 0; c < META / CHUNK; c++)
        copy16(dst + c * CHUNK + (lane & 15) * 16, src + c * CHUNK + (slot & 15) * 16);
#if META_FORM == CHANNEL                            // whole pages: a block's metadata lie as they are wanted
      if ((lane & 15) < META_BYTES) copy16(dst + META + (lane & 15) * 16, src + META + (lane & 15) * 16);
      if (begins_page(a, tile0 + i, i == 0)) {
        if (lane < CHANNELS / 16) copy16(to_channels + lane * 16, page_channels(a, slot, head) + lane * 8);
        to_channels = channels + (to_channels == channels) * CHANNELS;
      }
#else
      copy_few<META_BYTES>(dst + META + (lane & 15) * META_BYTES, src + META + (slot & 15) * META_BYTES);
#endif
      if (++issue_st == STAGES) issue_st = 0;
    };
#endif
    UNROLL for (int i = 0; i < STAGES - 1; i++) {
      if (i < n) issue(slot_of(i), i, 0);
#if !PAGED
      commit_copies();
#endif
    }
    int next = STAGES - 1 < n ? slot_of(STAGES - 1) : 0;
    const int chunk0 = s.chunk0 + warp;
    for (int chunk = chunk0; chunk < s.chunk1; chunk += WARPS) prefetch_window(a, s, head, chunk);
    if (!waited) wait_previous_kernel(), waited = true;   // plan, table, history: older than that
    float* mine = sm_o + warp * COLS * D;
    float2* mine_ml = sm_ml + warp * COLS;
    if (chunk0 < s.chunk1 || n == 0) {
      Warp w;
      w.begin(a, s, head, first_col);
      for (int chunk = chunk0; chunk < s.chunk1; chunk += WARPS) w.window(a, s, head, chunk);
      w.finish();
      w.save<true>(mine, mine_ml, COLS);
    }
    if (n > 0) {
      Warp w;
      w.begin(a, s, head, first_col);
      w.begin_history(a, head, side);
      auto consume = [&](auto first, int i) {
#if PAGED
        bar_wait(full + st * 8, phase);
#else
        wait_copies<STAGES - 2>();
#endif
        __syncwarp();
        if (i + STAGES - 1 < n) {
          const int slot = next;
          if (i + STAGES < n) next = slot_of(i + STAGES);
          issue(slot, i + STAGES - 1, w.stage_read(a));
        }
#if !PAGED
        commit_copies();
#endif
        const int tile = tile0 + i * STRIDE;
        visit_tile<HB, decltype(first)::value, STRIDE>(w, a, s, buf + st * STAGE, at_channels, tile);
        if (begins_page(a, tile, i == 0)) at_channels = channels + (at_channels == channels) * CHANNELS;
        if (++st == STAGES) st = 0, phase ^= 1;
      };
      consume(Flag<true>(), 0);
      for (int i = 1; i < n; i++) consume(Flag<false>(), i);
      w.end_history();
      w.finish();
      if (chunk0 < s.chunk1) w.absorb(mine, mine_ml);
      w.save<false>(mine, mine_ml, COLS);
    }
    __syncthreads();
    const int cols = min(COLS, s.q_len * G - first_col);
    const i64 p = partial_at(a, split, s.b, head, first_col);
    for (int i = threadIdx.x; i < cols * (D / 4); i += WARPS * 32) {
      const int c = i / (D / 4), ch = (i % (D / 4)) * 4;
      float top = HIDDEN, l = 0.f;
      float4 o = {0.f, 0.f, 0.f, 0.f};
      UNROLL for (int k = 0; k < WARPS; k++) top = fmaxf(top, sm_ml[k * COLS + c].x);
      UNROLL for (int k = 0; k < WARPS; k++) {
        const float2 ml = sm_ml[k * COLS + c];
        const float f = ex2(ml.x - top);
        const float4 v = *reinterpret_cast<const float4*>(sm_o + (k * COLS + c) * D + ch);
        o.x = fmaf(v.x, f, o.x); o.y = fmaf(v.y, f, o.y);
        o.z = fmaf(v.z, f, o.z); o.w = fmaf(v.w, f, o.w);
        l = fmaf(ml.y, f, l);
      }
      *reinterpret_cast<float4*>(a.o + (p + c) * D + ch) = o;
      if (ch == 0) a.ml[p + c] = make_float2(top, l);
    }
    __syncthreads();
  }
}
#endif
