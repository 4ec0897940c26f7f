// Rotate fresh q, k, v; write windows, sink cache and 2-bit history. After common.cu; also needs
// K_RANK, V_RANK (1: rank rule, 0: shrink rule), FEEDBACK (error feedback for K).
//
// A CTA owns one KV head of one part (K, V or the head's queries) and walks over tiles of 16 rows.
// Phase 1, rotation: x is exact in 16 bits and R is the sum of three 16-bit matrices, so three MMAs
// give float32 accuracy (two for queries, which are not quantised); warp w keeps the fragments of 8
// columns of R in registers.
// Phase 2, one warp per row: range, codes, packing. Error feedback walks over blocks of VEC
// channels: the lane that owns a block finds its codes, then all lanes apply its errors.
// R and the factor never change, so they are loaded while the previous kernel still runs.

struct StoreArgs {
  const u16* q;          // [T, HK * G, D], token strides below
  const u16* k;          // [T, HK, D]
  const u16* v;
  void* q_rot;           // [T, HK * G, D] float32, or the model's dtype (q_half), or null
  const float* r_k;      // [HK, D, D]
  const float* r_v;
  const float* factor;   // [HK, D, D] strictly upper triangular
  const i64* rows;       // [T]
  const i64* positions;
  const i64* ends;
  const i64* slots;
  const i64* cache_index;
  u8* blocks;
  u16* sink_k;
  u16* sink_v;
  u16* ring_k;
  u16* ring_v;
  u16* cache_k;
  u16* cache_v;
  i64 stride_q, stride_k, stride_v;
  int tokens, q_half, n_sink, n_recent, k_rank, v_rank;
  float k_ratio, v_ratio;   // half the shrink ratio
};

constexpr int ROWS = 16, VEC = D / 32, KSTEPS = D / 16;
constexpr int WARPS = D / 8 > ROWS ? D / 8 : ROWS;    // a warp per 8 columns, and per row
constexpr int Y_STRIDE = D + 4;
constexpr float ROUND_MAGIC = 12582912.f;             // 1.5 * 2^23: adding it rounds to even
constexpr float MAX_HALF = 65504.f;
#if WINDOW_BF16
constexpr float R_SCALE = 1.f;
#else
constexpr float R_SCALE = 4096.f;                     // keeps the low parts of R normal in FP16
#endif

template <int PARTS> struct RFragment { u32 part[PARTS][KSTEPS][2]; };
struct Rows { uint4 x[D / 32][2]; };                  // 16 rows as A operand

// Columns col .. col + 7 of R; K order as in load_rows: a lane's 8 consecutive channels.
template <int PARTS> DEV void load_r(RFragment<PARTS>& f, const float* r, int col, int g, int t) {
  UNROLL for (int s = 0; s < KSTEPS; s++)
    UNROLL for (int e = 0; e < 2; e++) {
      const float* p = r + (i64)(32 * (s >> 1) + 8 * t + 4 * (s & 1) + 2 * e) * D + col + g;
      float x = p[0] * R_SCALE, y = p[D] * R_SCALE;
      UNROLL for (int i = 0; i < PARTS; i++) {
        f.part[i][s][e] = pack_window(x, y);
        const float2 taken = unpack_window(f.part[i][s][e]);
        x -= taken.x, y -= taken.y;
      }
    }
}
DEV void load_rows(Rows& rows, const u16* row0, const u16* row1, int t) {
  const uint4 none = {0, 0, 0, 0};
  UNROLL for (int r = 0; r < D / 32; r++) {
    rows.x[r][0] = row0 ? *reinterpret_cast<const uint4*>(row0 + 32 * r + 8 * t) : none;
    rows.x[r][1] = row1 ? *reinterpret_cast<const uint4*>(row1 + 32 * r + 8 * t) : none;
  }
}
template <int PARTS> DEV void rotate_rows(float (&y)[4], const RFragment<PARTS>& f, const Rows& rows) {
  float sum[PARTS][4];                                // independent chains, small terms added first
  UNROLL for (int p = 0; p < PARTS; p++) sum[p][0] = sum[p][1] = sum[p][2] = sum[p][3] = 0.f;
  UNROLL for (int r = 0; r < D / 32; r++)
    UNROLL for (int p = 0; p < PARTS; p++) {
      const uint4 u = rows.x[r][0], v = rows.x[r][1];
      mma_window(sum[p], u.x, v.x, u.y, v.y, f.part[p][2 * r][0], f.part[p][2 * r][1]);
      mma_window(sum[p], u.z, v.z, u.w, v.w, f.part[p][2 * r + 1][0], f.part[p][2 * r + 1][1]);
    }
  UNROLL for (int e = 0; e < 4; e++) {
    y[e] = sum[PARTS - 1][e];
    UNROLL for (int p = PARTS - 2; p >= 0; p--) y[e] += sum[p][e];
    y[e] *= 1.f / R_SCALE;
  }
}

// ---- one warp, one row: lane l holds channels VEC * l .. + VEC - 1
struct Row { float v[VEC]; };
DEV float warp_max(float x) {
  UNROLL for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
DEV float half_round(float x) {
  x = fminf(fmaxf(x, -MAX_HALF), MAX_HALF);
  return unpack_half(pack_half(x, 0.f)).x;
}
// |y| of ascending rank: drop the largest D - 1 - rank elements one by one.
DEV float rank_limit(const Row& y, int rank) {
  const int lane = threadIdx.x & 31;
  Row left;
  UNROLL for (int k = 0; k < VEC; k++) left.v[k] = fabsf(y.v[k]);
  float top = 0.f;
  for (int drop = D - 1 - rank; drop >= 0; drop--) {
    float mine = left.v[0];
    UNROLL for (int k = 1; k < VEC; k++) mine = fmaxf(mine, left.v[k]);
    top = warp_max(mine);
    const int owner = __ffs(__ballot_sync(~0u, mine == top)) - 1;
    bool todo = lane == owner;
    UNROLL for (int k = 0; k < VEC; k++)
      if (todo && left.v[k] == top) left.v[k] = -1.f, todo = false;
  }
  return top;
}
template <bool RANK> DEV void row_range(const Row& y, float ratio, int rank, float& step, float& lo) {
  float low = y.v[0], high = y.v[0];
  UNROLL for (int k = 1; k < VEC; k++) low = fminf(low, y.v[k]), high = fmaxf(high, y.v[k]);
  low = -warp_max(-low);
  high = warp_max(high);
  if (RANK) {
    const float tau = rank_limit(y, rank);
    low = fminf(fmaxf(low, -tau), tau);
    high = fminf(fmaxf(high, -tau), tau);
  } else {
    const float span = __fsub_rn(high, low), half = __fmul_rn(span, ratio);
    const float mid = __fadd_rn(low, __fmul_rn(span, 0.5f));
    low = __fsub_rn(mid, half);
    high = __fadd_rn(mid, half);
  }
  step = half_round(__fdiv_rn(__fsub_rn(high, low), 3.f));
  lo = half_round(low);
}
// Nearest code of u = w - lo: its bits are the two lowest of the result, its value result - MAGIC.
DEV float nearest(float u, float inv3) { return fmaf(__saturatef(u * inv3), 3.f, ROUND_MAGIC); }

template <int N> DEV void load_shared(float (&f)[N], const float* p) {
  if (N == 4) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    f[0] = x.x, f[1] = x.y, f[N - 2] = x.z, f[N - 1] = x.w;
  } else {
    const float2 x = *reinterpret_cast<const float2*>(p);
    f[0] = x.x, f[1] = x.y;
  }
}
// y becomes w - lo and then the codes' bits.
DEV void feedback(Row& y, u32 (&code)[VEC], float step, float inv3, const float* factor) {
  const int lane = threadIdx.x & 31;
  float f[VEC][VEC], ahead[VEC][VEC];
  UNROLL for (int i = 0; i < VEC; i++) load_shared<VEC>(f[i], factor + i * D + lane * VEC);
  _Pragma("unroll 2") for (int owner = 0; owner < 32; owner++) {
    const float* next = factor + (min(owner + 1, 31) * VEC) * D + lane * VEC;
    UNROLL for (int i = 0; i < VEC; i++) load_shared<VEC>(ahead[i], next + i * D);
    float u[VEC], error[VEC];
    UNROLL for (int k = 0; k < VEC; k++) u[k] = y.v[k];
    UNROLL for (int i = 0; i < VEC; i++) {
      const float biased = nearest(u[i], inv3);
      if (lane == owner) code[i] = __float_as_uint(biased) & 3;
      error[i] = fmaf(-(biased - ROUND_MAGIC), step, u[i]);
      UNROLL for (int k = i + 1; k < VEC; k++) u[k] = fmaf(-error[i], f[i][k], u[k]);
    }
    UNROLL for (int i = 0; i < VEC; i++) {
      const float e = __shfl_sync(~0u, error[i], owner);
      UNROLL for (int k = 0; k < VEC; k++) y.v[k] = fmaf(-e, f[i][k], y.v[k]);
    }
    UNROLL for (int i = 0; i < VEC; i++)
      UNROLL for (int k = 0; k < VEC; k++) f[i][k] = ahead[i][k];
  }
}
DEV void write_model_row(u16* dst, const Row& y) {
  const int lane = threadIdx.x & 31;
  u32 w[VEC / 2];
  UNROLL for (int k = 0; k < VEC / 2; k++) w[k] = pack_window(y.v[2 * k], y.v[2 * k + 1]);
  if (VEC == 4) *reinterpret_cast<uint2*>(dst + lane * VEC) = make_uint2(w[0], w[VEC / 2 - 1]);
  else *reinterpret_cast<u32*>(dst + lane * VEC) = w[0];
}
// Lane l holds plane l / 4 of the halves VEC * (l % 4) .. + VEC - 1.
DEV void write_codes(u8* head_block, int token, int kv, const u32 (&code)[VEC], float step, float lo) {
  const int lane = threadIdx.x & 31, shift = 2 * (lane >> 2), part = lane & 3;
  u32 w[VEC / 2];
  UNROLL for (int k = 0; k < VEC / 2; k++) {
    w[k] = (code[2 * k] << shift) | (code[2 * k + 1] << (16 + shift));
    UNROLL for (int o = 4; o < 32; o <<= 1) w[k] |= __shfl_xor_sync(~0u, w[k], o);
  }
  const int byte = part * VEC * 2, chunk = kv * (D / 64) + byte / 16;
  u8* dst = head_block + chunk * CHUNK + token * 16 + byte % 16;
  if (lane < 4) {
    if (VEC == 4) *reinterpret_cast<uint2*>(dst) = make_uint2(w[0], w[VEC / 2 - 1]);
    else *reinterpret_cast<u32*>(dst) = w[0];
  }
  if (lane == 4) *reinterpret_cast<u32*>(head_block + META + token * 8 + kv * 4) = pack_half(step, lo);
}

template <bool KEY> DEV void store_row(const StoreArgs& a, int head, int token, const float* y_row, const float* factor) {
  const int lane = threadIdx.x & 31;
  const i64 slot = a.slots[token], row = a.rows[token], pos = a.positions[token];
  const i64 end = a.ends[token], cached = a.cache_index[token];
  if (slot < 0) return;
  Row y;
  load_shared<VEC>(y.v, y_row + lane * VEC);
  u16* sink = KEY ? a.sink_k : a.sink_v;
  u16* ring = KEY ? a.ring_k : a.ring_v;
  u16* cache = KEY ? a.cache_k : a.cache_v;
  if (pos < a.n_sink) write_model_row(sink + ((row * a.n_sink + pos) * HK + head) * D, y);
  if (pos >= end - a.n_recent)
    write_model_row(ring + ((row * a.n_recent + pos % a.n_recent) * HK + head) * D, y);
  if (cached >= 0) write_model_row(cache + (cached * HK + head) * D, y);
  float step, lo;
  row_range<KEY ? K_RANK : V_RANK>(y, KEY ? a.k_ratio : a.v_ratio, KEY ? a.k_rank : a.v_rank, step, lo);
  const float inv3 = step > 0.f ? __fdiv_rn(1.f, step) * (1.f / 3.f) : 0.f;
  u32 code[VEC];
  UNROLL for (int k = 0; k < VEC; k++) y.v[k] -= lo;
  if (KEY && FEEDBACK) feedback(y, code, step, inv3, factor);
  else UNROLL for (int k = 0; k < VEC; k++) code[k] = __float_as_uint(nearest(y.v[k], inv3)) & 3;
  write_codes(a.blocks + ((slot >> 4) * HK + head) * HB, (int)(slot & 15), KEY ? 0 : 1, code, step, lo);
}

// ---- the parts; tiles blockIdx.x, + gridDim.x, ...; the next tile's rows travel meanwhile
template <bool KEY> DEV void store_part(const StoreArgs& a, float* y_tile, float* factor) {
  const int head = blockIdx.y, tiles = div_up(a.tokens, ROWS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (blockIdx.x >= tiles) return;
  if (KEY && FEEDBACK) {
    const float* src = a.factor + (i64)head * D * D;
    for (int i = threadIdx.x * 4; i < D * D; i += WARPS * 32 * 4) copy16(smem_addr(factor + i), src + i);
  }
  const bool rotates = warp < D / 8;
  RFragment<3> r;
  if (rotates) load_r(r, (KEY ? a.r_k : a.r_v) + (i64)head * D * D, warp * 8, g, t);
  wait_previous_kernel();
  Rows rows;
  auto fetch = [&](int tile) {
    const u16* src[2];
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      src[e] = i < a.tokens ? (KEY ? a.k + i * a.stride_k : a.v + i * a.stride_v) + head * D : nullptr;
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
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    const int token = tile * ROWS + warp;
    if (warp < ROWS && token < a.tokens) store_row<KEY>(a, head, token, y_tile + warp * Y_STRIDE, factor);
    __syncthreads();
  }
}
DEV void query_part(const StoreArgs& a) {
  const int head = blockIdx.y, n = a.tokens * G, tiles = div_up(n, ROWS);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (a.q_rot == nullptr || blockIdx.x >= tiles || warp >= D / 8) return;
  RFragment<2> r;
  load_r(r, a.r_k + (i64)head * D * D, warp * 8, g, t);
  wait_previous_kernel();
  auto fetch = [&](Rows& rows, int tile) {
    const u16* src[2];
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      src[e] = i < n ? a.q + (i / G) * a.stride_q + (head * G + i % G) * D : nullptr;
    }
    load_rows(rows, src[0], src[1], t);
  };
  auto finish = [&](const Rows& rows, int tile) {
    float y[4];
    rotate_rows(y, r, rows);
    UNROLL for (int e = 0; e < 2; e++) {
      const int i = tile * ROWS + g + 8 * e;
      if (i >= n) continue;
      const i64 at = ((i64)(i / G) * (HK * G) + head * G + i % G) * D + warp * 8 + 2 * t;
      if (a.q_half) reinterpret_cast<u32*>(a.q_rot)[at / 2] = pack_window(y[2 * e], y[2 * e + 1]);
      else reinterpret_cast<float2*>(a.q_rot)[at / 2] = make_float2(y[2 * e], y[2 * e + 1]);
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
  extern __shared__ __align__(128) u8 smem[];
  float* y_tile = reinterpret_cast<float*>(smem);               // [ROWS][Y_STRIDE]
  float* factor = y_tile + ROWS * Y_STRIDE;                     // [D][D], K only
  release_next_kernel();
  if (blockIdx.z == 0) store_part<true>(a, y_tile, factor);
  else if (blockIdx.z == 1) store_part<false>(a, y_tile, factor);
  else query_part(a);
}
