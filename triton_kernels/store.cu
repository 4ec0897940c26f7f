// Store fresh q, k, v. After position.cu; needs WARPS of store (one for 8 columns, and per row), Y_STRIDE of a
// float row in shared memory. Two kernels:
//
// store: everything at once, for prefill. A CTA owns one KV head of one part (K, V or the head's
// queries) and walks over tiles of 16 rows: all its warps rotate the tile, then each encodes a row.
//
// rotate: the part of store that attend of the same step needs, for decode, where few tokens make
// latency all that counts: each CTA takes 32 columns of a part, so that R comes from many
// processors. The rotated rows stay in float32 for merge.cu, which encodes them beside its own work.
//
// R and the factor never change, so they are loaded while the previous kernel still runs.
//
// With POSITION either kernel also multiplies each key's row of cosines and sines with `lift`, and writes C(q) beside
// the rotated queries.

struct StoreArgs {
  const u16* q;          // [T, HK * G, D], token strides below
  const u16* k;          // [T, HK, D]
  const u16* v;
  void* q_rot;           // [T, HK * G, Q_ROW] float32, or the model's dtype (q_half; not of POSITION), or null
  float* kv_rot;         // [2, T, HK, D] (POSITION: 3, rows of lift last), rotate only
  const float* r_k;      // [HK, D, D]
  const float* r_v;
  WindowArgs to;
  CodeArgs codes;        // store only
  i64 stride_q, stride_k, stride_v;
  int tokens, q_half;
  const float* r_q;      // [HK, D, D]: r_k, but for POSITION
  MeanArgs mean;         // POSITION
};

DEV const u16* kv_row(const StoreArgs& a, bool key, int token, int head) {
  return (key ? a.k + token * a.stride_k : a.v + token * a.stride_v) + head * D;
}
DEV const u16* q_row(const StoreArgs& a, int i, int head) {   // i: token * G + query head of the group
  return a.q + (i / G) * a.stride_q + (head * G + i % G) * D;
}
// Two columns of a rotated query
DEV void write_query(const StoreArgs& a, int i, int head, int col, float x, float y) {
  const i64 at = ((i64)(i / G) * (HK * G) + head * G + i % G) * Q_ROW + col;
  if (a.q_half) reinterpret_cast<u32*>(a.q_rot)[at / 2] = pack_window(x, y);
  else reinterpret_cast<float2*>(a.q_rot)[at / 2] = make_float2(x, y);
}

// ---- store: tiles blockIdx.x, + gridDim.x, ...; the next tile's rows travel meanwhile
template <bool KEY> DEV void store_part(const StoreArgs& a, float* y_tile, float* factor) {
  const int head = blockIdx.y, tiles = div_up(a.tokens, ROWS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (blockIdx.x >= tiles) return;
  if (KEY && FEEDBACK) fetch_factor(factor, a.codes, head, WARPS * 32);
  const bool rotates = warp < D / 8;
  RFragment<3> r;
  if (rotates) load_r(r, (KEY ? a.r_k : a.r_v) + (i64)head * D * D, warp * 8, g, t);
  wait_previous_kernel();
  Rows rows;
  auto fetch = [&](int tile) {
    const u16* src[2];
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      src[e] = i < a.tokens ? kv_row(a, KEY, i, head) : nullptr;
    }
    load_rows(rows, src[0], src[1], t);
  };
  if (rotates) fetch(blockIdx.x);
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (rotates) {
      float y[4];
      rotate_rows(y, r, rows);
      UNROLL for (int e = 0; e < 2; e++)
        *reinterpret_cast<float2*>(y_tile + (g + 8 * e) * Y_STRIDE + warp * 8 + 2 * t) =
            make_float2(y[2 * e], y[2 * e + 1]);
      fetch(tile + gridDim.x);
    }
    wait_all_copies();
    __syncthreads();
    const int token = tile * ROWS + warp;
    const i64 slot = warp < ROWS && token < a.tokens ? a.to.slots[token] : -1;
    if (slot >= 0) {
      Row y;
      load_shared<VEC>(y.v, y_tile + warp * Y_STRIDE + lane * VEC);
      each_window<KEY>(a.to, head, token, [&](u16* row) { write_model_row(row, y); });
      store_codes<KEY>(a.codes, head, slot, y, factor);
    }
    __syncthreads();
  }
}
#if META_FORM == POSITION
// C(q) of two columns, beside the rotated query
DEV void write_mixed(const StoreArgs& a, int i, int head, int col, const Mix& mix) {
  const float2 c = mix.of(q_row(a, i, head), col);
  const i64 row = ((i64)(i / G) * (HK * G) + head * G + i % G) * Q_ROW;
  reinterpret_cast<u32*>(reinterpret_cast<float*>(a.q_rot) + row + D)[col / 2] =
      pack_half(fminf(fmaxf(c.x, -MAX_HALF), MAX_HALF), fminf(fmaxf(c.y, -MAX_HALF), MAX_HALF));
}
DEV void load_turns(Rows& rows, const StoreArgs& a, int tile, int g, int t) {
  const u16* src[2];
  UNROLL for (int e = 0; e < 2; e++) {
    const int i = tile * ROWS + g + 8 * e;
    src[e] = i < a.tokens ? turn_of(a.mean, i) : nullptr;
  }
  load_rows(rows, src[0], src[1], t);
}
// K's part: as store_part, but what is coded of a row, and then its gain, takes the whole tile
DEV void store_keys(const StoreArgs& a, float* y_tile, float* u_tile, u16* half_tile, float* factor) {
  const int head = blockIdx.y, tiles = div_up(a.tokens, ROWS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (blockIdx.x >= tiles) return;
  fetch_factor(factor, a.codes, head, WARPS * 32);
  const bool rotates = warp < D / 8;
  const i64 column = ((i64)head * D + warp * 8 + g) * D;
  RFragment<3> r;
  HalfColumn lift, metric;
  if (rotates) {
    load_r(r, a.r_k + (i64)head * D * D, warp * 8, g, t);
    lift.load(a.mean.lift + column, t);
    if (t == 0) prefetch(a.mean.metric + column), prefetch(a.mean.metric + column + D / 2);
    if (lane < 2 * D / 32) prefetch(a.mean.mix + head * 2 * D + lane * 32);
  }
  wait_previous_kernel();
  auto put = [&](float* tile, const float (&y)[4]) {
    UNROLL for (int e = 0; e < 2; e++)
      *reinterpret_cast<float2*>(tile + (g + 8 * e) * Y_STRIDE + warp * 8 + 2 * t) = make_float2(y[2 * e], y[2 * e + 1]);
  };
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int token = tile * ROWS + warp, next = token + gridDim.x * ROWS;
    if (lane < 2 && warp < ROWS && next < a.tokens) prefetch(kv_row(a, true, next, head) + lane * (D / 2));
    const i64 slot = warp < ROWS && token < a.tokens ? a.to.slots[token] : -1;
    float y[4], share = slot >= 0 ? mean_share(a.mean, head, token) : 0.f;
    if (rotates) {
      const u16* src[2];
      UNROLL for (int e = 0; e < 2; e++) {
        const int i = tile * ROWS + g + 8 * e;
        src[e] = i < a.tokens ? kv_row(a, true, i, head) : nullptr;
      }
      Rows rows, turned;
      load_rows(rows, src[0], src[1], t);
      load_turns(turned, a, tile, g, t);
      rotate_rows(y, r, rows);
      put(y_tile, y);
      multiply_half(y, turned, lift);
      put(u_tile, y);
      metric.load(a.mean.metric + column, t);
    }
    wait_all_copies();
    __syncthreads();
    Key key;
    if (slot >= 0) {
      Row k, u;
      load_shared<VEC>(k.v, y_tile + warp * Y_STRIDE + lane * VEC);
      load_shared<VEC>(u.v, u_tile + warp * Y_STRIDE + lane * VEC);
      each_window<true>(a.to, head, token, [&](u16* row) { write_model_row(row, k); });
      key = begin_key(a.codes, a.mean, head, share, k, u, half_tile + warp * HALF_STRIDE);
    }
    __syncthreads();
    if (rotates) {
      Rows half;
      load_half_rows(half, half_tile, g, t, true);
      multiply_half(y, half, metric);
      put(u_tile, y);
    }
    __syncthreads();
    if (slot >= 0) {
      Row product;
      load_shared<VEC>(product.v, u_tile + warp * Y_STRIDE + lane * VEC);
      finish_key(a.codes, head, slot, key, product, factor);
    }
    __syncthreads();
  }
}
#endif
DEV void query_part(const StoreArgs& a) {
  const int head = blockIdx.y, n = a.tokens * G, tiles = div_up(n, ROWS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (a.q_rot == nullptr || blockIdx.x >= tiles || warp >= D / 8) return;
  RFragment<2> r;
  load_r(r, (META_FORM == POSITION ? a.r_q : a.r_k) + (i64)head * D * D, warp * 8, g, t);
#if META_FORM == POSITION
  Mix mix;
  mix.load(a.mean, head, warp * 8 + 2 * t);
#endif
  wait_previous_kernel();
  auto fetch = [&](Rows& rows, int tile) {
    const u16* src[2];
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      src[e] = i < n ? q_row(a, i, head) : nullptr;
    }
    load_rows(rows, src[0], src[1], t);
  };
  auto finish = [&](const Rows& rows, int tile) {
    float y[4];
    rotate_rows(y, r, rows);
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      if (i >= n) continue;
#if META_FORM == POSITION
      write_mixed(a, i, head, warp * 8 + 2 * t, mix);
#endif
      write_query(a, i, head, warp * 8 + 2 * t, y[2 * e], y[2 * e + 1]);
    }
  };
  Rows even, odd;
  fetch(even, blockIdx.x);
  for (int tile = blockIdx.x; tile < tiles; tile += 2 * gridDim.x) {
    fetch(odd, tile + gridDim.x);
    finish(even, tile);
    fetch(even, tile + 2 * gridDim.x);
    finish(odd, tile + gridDim.x);
  }
}

extern "C" __global__ __launch_bounds__(WARPS * 32, 1) void store(const __grid_constant__ StoreArgs a) {
  DYNAMIC_SHARED(u8, smem, 128);
  float* y_tile = reinterpret_cast<float*>(smem);               // [ROWS][Y_STRIDE]
  float* factor = y_tile + ROWS * Y_STRIDE;                     // [D][D], K only
  release_next_kernel();
#if META_FORM == POSITION
  float* u_tile = factor + D * D;                               // as y_tile
  u16* half_tile = reinterpret_cast<u16*>(u_tile + ROWS * Y_STRIDE);   // [ROWS][HALF_STRIDE]
  if (blockIdx.z == 0) store_keys(a, y_tile, u_tile, half_tile, factor);
#else
  if (blockIdx.z == 0) store_part<true>(a, y_tile, factor);
#endif
  else if (blockIdx.z == 1) store_part<false>(a, y_tile, factor);
  else query_part(a);
}

// ---- rotate: CTAs of 4 warps, 8 columns each; blockIdx.z = 3 parts (POSITION: 4) x D / 32 groups of columns
template <int PART> DEV void rotate_part(const StoreArgs& a, int col0) {
  constexpr int QUERY = 2;
  const int head = blockIdx.y, n = PART == QUERY ? a.tokens * G : a.tokens, tiles = div_up(n, ROWS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (blockIdx.x >= tiles) return;
  const int col = col0 + warp * 8;
  RFragment<PART == QUERY ? 2 : 3> r;
  load_r(r, (PART == 1 ? a.r_v : PART == QUERY && META_FORM == POSITION ? a.r_q : a.r_k) + (i64)head * D * D, col, g, t);
#if META_FORM == POSITION
  Mix mix;
  if (PART == QUERY) mix.load(a.mean, head, col + 2 * t);
#endif
  wait_previous_kernel();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u16* src[2];
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      src[e] = i >= n ? nullptr : PART == QUERY ? q_row(a, i, head) : kv_row(a, PART == 0, i, head);
    }
    Rows rows;
    load_rows(rows, src[0], src[1], t);
    float y[4];
    rotate_rows(y, r, rows);
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e, at = col + 2 * t;
      if (i >= n) continue;
      if (PART == QUERY) {
#if META_FORM == POSITION
        write_mixed(a, i, head, at, mix);
#endif
        write_query(a, i, head, at, y[2 * e], y[2 * e + 1]);
      } else if (a.to.slots[i] >= 0) {
        const u32 packed = pack_window(y[2 * e], y[2 * e + 1]);
        each_window<PART == 0>(a.to, head, i, [&](u16* row) { *reinterpret_cast<u32*>(row + at) = packed; });
        *reinterpret_cast<float2*>(a.kv_rot + (((i64)PART * a.tokens + i) * HK + head) * D + at) =
            make_float2(y[2 * e], y[2 * e + 1]);
      }
    }
  }
}
#if META_FORM == POSITION
DEV void lift_part(const StoreArgs& a, int col0) {
  const int head = blockIdx.y, tiles = div_up(a.tokens, ROWS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, col = col0 + warp * 8;
  HalfColumn lift;
  lift.load(a.mean.lift + ((i64)head * D + col + g) * D, t);
  if (lane < 2 * D / 32) prefetch(a.mean.mix + head * 2 * D + lane * 32);
  wait_previous_kernel();
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Rows rows;
    float y[4];
    load_turns(rows, a, tile, g, t);
    for (int row = col / 8; row < ROWS; row += D / 8) {             // each warp's share of the shares
      const int i = tile * ROWS + row;
      if (i >= a.tokens || a.to.slots[i] < 0) continue;
      const float share = mean_share(a.mean, head, i);
      if (lane == 0) a.mean.shares[i * HK + head] = share;
    }
    multiply_half(y, rows, lift);
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      if (i < a.tokens && a.to.slots[i] >= 0)
        *reinterpret_cast<float2*>(a.kv_rot + (((i64)2 * a.tokens + i) * HK + head) * D + col + 2 * t) =
            make_float2(y[2 * e], y[2 * e + 1]);
    }
  }
}
#endif
extern "C" __global__ __launch_bounds__(128) void rotate(const __grid_constant__ StoreArgs a) {
  release_next_kernel();
  const int part = blockIdx.z / (D / 32), col0 = blockIdx.z % (D / 32) * 32;
  if (part == 0) rotate_part<0>(a, col0);
  else if (part == 1) rotate_part<1>(a, col0);
#if META_FORM == POSITION
  else if (part == 3) lift_part(a, col0);
#endif
  else rotate_part<2>(a, col0);
}
