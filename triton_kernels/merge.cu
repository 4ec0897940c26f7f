// Merge of the splits of attend.cu, with the inverse V rotation. After position.cu; needs
// MERGE_ROWS, the query heads a CTA finishes at a time (a divisor of GROUP or more), and MERGE_WARPS.
//
// A CTA keeps its KV head's matrix in registers - loaded before the attend kernel has finished,
// since it never changes - and walks over its share of the query tokens. Other CTAs encode the rows
// that `rotate` left: nothing reads their codes in this step, so they cost no time of their own.

struct MergeArgs {
  void* out;             // [T, HK * G, D] model dtype
  float* lse;            // [T, HK * G] or null
  const float* o;        // [splits + B, HK, columns, D]
  const float2* ml;      // [splits + B, HK, columns]
  const int* plan;
  const float* r_v;      // [HK, D, D]
  const float* kv_rot;   // [2, fresh, HK, D] of `rotate` (POSITION: 3)
  const i64* slots;      // [fresh]
  CodeArgs codes;
  int columns, max_q, tokens, slices, fresh;   // tokens: B * max_q; slices of a group's heads
  MeanArgs mean;         // POSITION
};

constexpr int OUT = D / MERGE_WARPS;      // output channels of a warp

template <int N> struct Vec { float v[N]; };
DEV Vec<VEC> load_vec(const float* p) {
  Vec<VEC> r;
  if (VEC == 4) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    r.v[0] = x.x; r.v[1] = x.y; r.v[VEC - 2] = x.z; r.v[VEC - 1] = x.w;
  } else {
    const float2 x = *reinterpret_cast<const float2*>(p);
    r.v[0] = x.x; r.v[1] = x.y;
  }
  return r;
}
DEV u16 to_model(float x) { return (u16)pack_window(x, 0.f); }

// Codes of the fresh K or V rows of a KV head, a warp per row.
template <bool KEY> DEV void encode_fresh(const MergeArgs& a, float* factor) {
  const int head = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row0 = blockIdx.x * MERGE_WARPS + warp;
  if (blockIdx.x * MERGE_WARPS >= a.fresh) return;
  if (KEY && FEEDBACK) fetch_factor(factor, a.codes, head, MERGE_WARPS * 32);
  wait_previous_kernel();
  wait_all_copies();
  __syncthreads();
  for (int token = row0; token < a.fresh; token += gridDim.x * MERGE_WARPS) {
    const i64 slot = a.slots[token];
    if (slot < 0) continue;
    Row y;
    load_shared<VEC>(y.v, a.kv_rot + (((i64)(KEY ? 0 : 1) * a.fresh + token) * HK + head) * D + lane * VEC);
    store_codes<KEY>(a.codes, head, slot, y, factor);
  }
}

#if META_FORM == POSITION
// Keys' codes: as encode_fresh, but a round of 8 rows goes through the metric together.
DEV void encode_fresh_keys(const MergeArgs& a, float* factor) {
  const int head = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (blockIdx.x * MERGE_WARPS >= a.fresh) return;
  float* product = factor + D * D;                               // [MERGE_WARPS][D]
  u16* half_tile = reinterpret_cast<u16*>(product + MERGE_WARPS * D);   // [MERGE_WARPS][HALF_STRIDE]
  fetch_factor(factor, a.codes, head, MERGE_WARPS * 32);
  HalfColumn metric[D / 64];
  UNROLL for (int i = 0; i < D / 64; i++)
    metric[i].load(a.mean.metric + ((i64)head * D + (i * MERGE_WARPS + warp) * 8 + g) * D, t);
  wait_previous_kernel();
  wait_all_copies();
  __syncthreads();
  for (int first = blockIdx.x * MERGE_WARPS; first < a.fresh; first += gridDim.x * MERGE_WARPS) {
    const int token = first + warp;
    const i64 slot = token < a.fresh ? a.slots[token] : -1;
    Key key;
    if (slot >= 0) {
      Row k, u;
      const float* row = a.kv_rot + ((i64)token * HK + head) * D + lane * VEC;
      load_shared<VEC>(k.v, row);
      load_shared<VEC>(u.v, row + (i64)2 * a.fresh * HK * D);
      const float share = a.mean.shares[token * HK + head];
      key = begin_key(a.codes, a.mean, head, share, k, u, half_tile + warp * HALF_STRIDE);
    }
    __syncthreads();
    Rows rows;
    load_half_rows(rows, half_tile, g, t, false);
    UNROLL for (int i = 0; i < D / 64; i++) {
      float y[4];
      const int col = (i * MERGE_WARPS + warp) * 8;
      multiply_half(y, rows, metric[i]);
      *reinterpret_cast<float2*>(product + g * D + col + 2 * t) = make_float2(y[0], y[1]);
    }
    __syncthreads();
    if (slot >= 0) {
      Row y;
      load_shared<VEC>(y.v, product + warp * D + lane * VEC);
      finish_key(a.codes, head, slot, key, y, factor);
    }
  }
}
#endif

extern "C" __global__ __launch_bounds__(MERGE_WARPS * 32) void merge(const __grid_constant__ MergeArgs a) {
  constexpr int AHEAD = MERGE_ROWS == 1 ? 9 : 1;   // splits whose loads are in flight together
  __shared__ float part[MERGE_WARPS][MERGE_ROWS][D], mean[MERGE_ROWS][D];
  __shared__ float2 part_ml[MERGE_WARPS][MERGE_ROWS];
  DYNAMIC_SHARED(float, factor, 16);
  if (blockIdx.z >= a.slices) {
    release_next_kernel();
#if META_FORM == POSITION
    if (blockIdx.z == a.slices) encode_fresh_keys(a, factor);
#else
    if (blockIdx.z == a.slices) encode_fresh<true>(a, factor);
#endif
    else encode_fresh<false>(a, factor);
    return;
  }
  const int head = blockIdx.y, row0 = blockIdx.z * MERGE_ROWS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Vec<VEC> back[OUT];                     // row c of R is column c of its inverse
  UNROLL for (int c = 0; c < OUT; c++)
    back[c] = load_vec(a.r_v + ((i64)head * D + warp * OUT + c) * D + lane * VEC);
  wait_previous_kernel();
  release_next_kernel();
  for (int token = blockIdx.x; token < a.tokens; token += gridDim.x) {
    const int b = token / a.max_q, qi = token % a.max_q;
    const int4* fields = reinterpret_cast<const int4*>(a.plan + HEADER + b * FIELDS);
    const int4 f0 = fields[0], f1 = fields[1];      // .., q_start; q_len, begin, end, splits
    if (qi >= f1.x) continue;             // the same for the whole CTA
    const int first = f1.w & 0xFFFF, last = f1.z > f1.y ? f1.w >> 16 : first - 1;
    const i64 p0 = ((i64)b * HK + head) * a.columns + qi * G + row0, step = (i64)HK * a.columns;
    float top[MERGE_ROWS], l[MERGE_ROWS];
    Vec<VEC> acc[MERGE_ROWS];
    UNROLL for (int r = 0; r < MERGE_ROWS; r++) {
      top[r] = HIDDEN;
      l[r] = 0.f;
      UNROLL for (int k = 0; k < VEC; k++) acc[r].v[k] = 0.f;
    }
    for (int i0 = first + warp; i0 <= last; i0 += MERGE_WARPS * AHEAD) {
      float2 ml[AHEAD][MERGE_ROWS];
      Vec<VEC> v[AHEAD][MERGE_ROWS];
      UNROLL for (int u = 0; u < AHEAD; u++)
        UNROLL for (int r = 0; r < MERGE_ROWS; r++) {
          const int i = min(i0 + u * MERGE_WARPS, last);
          const bool ok = i0 + u * MERGE_WARPS <= last && row0 + r < G;
          const i64 p = p0 + i * step + (row0 + r < G ? r : 0);
          ml[u][r] = a.ml[p];
          v[u][r] = load_vec(a.o + p * D + lane * VEC);
          if (!ok) ml[u][r] = make_float2(HIDDEN, 0.f);
        }
      UNROLL for (int r = 0; r < MERGE_ROWS; r++) {
        float now = top[r];
        UNROLL for (int u = 0; u < AHEAD; u++) now = fmaxf(now, ml[u][r].x);
        const float fade = ex2(top[r] - now);
        top[r] = now;
        l[r] *= fade;
        UNROLL for (int k = 0; k < VEC; k++) acc[r].v[k] *= fade;
        UNROLL for (int u = 0; u < AHEAD; u++) {
          const float w = ml[u][r].y > 0.f ? ex2(ml[u][r].x - now) : 0.f;
          l[r] = fmaf(ml[u][r].y, w, l[r]);
          UNROLL for (int k = 0; k < VEC; k++) acc[r].v[k] = fmaf(v[u][r].v[k], w, acc[r].v[k]);
        }
      }
    }
    UNROLL for (int r = 0; r < MERGE_ROWS; r++) {
      UNROLL for (int k = 0; k < VEC; k++) part[warp][r][lane * VEC + k] = acc[r].v[k];
      if (lane == 0) part_ml[warp][r] = make_float2(top[r], l[r]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < MERGE_ROWS * D; i += MERGE_WARPS * 32) {
      const int r = i / D, c = i % D;
      float s = 0.f, t = 0.f, high = HIDDEN;
      UNROLL for (int w = 0; w < MERGE_WARPS; w++) high = fmaxf(high, part_ml[w][r].x);
      UNROLL for (int w = 0; w < MERGE_WARPS; w++) {
        const float weight = ex2(part_ml[w][r].x - high);
        s = fmaf(part[w][r][c], weight, s);
        t = fmaf(part_ml[w][r].y, weight, t);
      }
      mean[r][c] = t > 0.f ? s / t : 0.f;
      if (c == 0 && a.lse != nullptr && row0 + r < G)
        a.lse[(i64)(f0.w + qi) * (HK * G) + head * G + row0 + r] =
            t > 0.f ? (high + lg2(t)) * (1.f / LOG2E) : -__int_as_float(0x7f800000);
    }
    __syncthreads();
    UNROLL for (int r = 0; r < MERGE_ROWS; r++) {
      if (row0 + r >= G) continue;
      const Vec<VEC> m = load_vec(&mean[r][lane * VEC]);
      float dot[OUT];
      UNROLL for (int c = 0; c < OUT; c++) {
        dot[c] = 0.f;
        UNROLL for (int k = 0; k < VEC; k++) dot[c] = fmaf(back[c].v[k], m.v[k], dot[c]);
      }
      // Reduce OUT sums over 32 lanes together: each step halves the sums a lane still carries.
      int keep = 0;
      UNROLL for (int o = 16, len = OUT; o; o >>= 1) {
        if (len > 1) {
          len /= 2;
          const bool upper = lane & o;
          UNROLL for (int c = 0; c < OUT / 2; c++)
            if (c < len) {
              const float give = upper ? dot[c] : dot[c + len];
              const float mine = upper ? dot[c + len] : dot[c];
              dot[c] = mine + __shfl_xor_sync(~0u, give, o);
            }
          keep = keep * 2 + (upper ? 1 : 0);
        } else {
          dot[0] += __shfl_xor_sync(~0u, dot[0], o);
        }
      }
      constexpr int SPARE = 32 / OUT;      // lanes that hold the same sum
      if (lane % SPARE == 0) {
        const i64 at = ((i64)(f0.w + qi) * (HK * G) + head * G + row0 + r) * D + warp * OUT + keep;
        reinterpret_cast<u16*>(a.out)[at] = to_model(dot[0]);
      }
    }
    __syncthreads();
  }
}
