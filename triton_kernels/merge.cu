// Merge of the splits of attend.cu, with the inverse V rotation. After common.cu; needs ROWS, the
// query heads a CTA finishes at a time (a divisor of GROUP or more).
//
// A CTA keeps its KV head's matrix in registers - loaded before the attend kernel has finished,
// since it never changes - and walks over its share of the query tokens.

struct MergeArgs {
  void* out;             // [T, HK * G, D] model dtype
  float* lse;            // [T, HK * G] or null
  const float* o;        // [splits + B, HK, columns, D]
  const float2* ml;      // [splits + B, HK, columns]
  const int* plan;
  const float* r_v;      // [HK, D, D]
  int columns, max_q, tokens;   // tokens: B * max_q
};

constexpr int MERGE_WARPS = 8;
constexpr int VEC = D / 32;               // channels of a lane
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

extern "C" __global__ __launch_bounds__(MERGE_WARPS * 32) void merge(const __grid_constant__ MergeArgs a) {
  __shared__ float part[MERGE_WARPS][ROWS][D], mean[ROWS][D], part_l[MERGE_WARPS][ROWS], tops[MERGE_WARPS][ROWS];
  const int head = blockIdx.y, row0 = blockIdx.z * ROWS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Vec<VEC> back[OUT];                     // row c of R is column c of its inverse
  UNROLL for (int c = 0; c < OUT; c++)
    back[c] = load_vec(a.r_v + ((i64)head * D + warp * OUT + c) * D + lane * VEC);
  wait_previous_kernel();
  release_next_kernel();
  const i64 total = a.plan[0], n = a.plan[1];
  for (int token = blockIdx.x; token < a.tokens; token += gridDim.x) {
    const int b = token / a.max_q, qi = token % a.max_q;
    const int* f = a.plan + HEADER + b * FIELDS;
    if (qi >= f[4]) continue;             // the same for the whole CTA
    const i64 begin = f[5], end = f[6];
    int first = 0, last = -1;             // splits of this request (plan.py)
    if (end > begin) first = (int)(((begin + 1) * n - 1) / total), last = (int)((end * n - 1) / total);
    const i64 p0 = ((i64)b * HK + head) * a.columns + qi * G + row0, step = (i64)HK * a.columns;
    float top[ROWS], l[ROWS];
    Vec<VEC> acc[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
      top[r] = HIDDEN;
      l[r] = 0.f;
      UNROLL for (int k = 0; k < VEC; k++) acc[r].v[k] = 0.f;
    }
    for (int i = first + threadIdx.x; i <= last; i += MERGE_WARPS * 32)
      UNROLL for (int r = 0; r < ROWS; r++)
        if (row0 + r < G) top[r] = fmaxf(top[r], a.ml[p0 + i * step + r].x);
    UNROLL for (int r = 0; r < ROWS; r++) {
      UNROLL for (int o = 16; o; o >>= 1) top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], o));
      if (lane == 0) tops[warp][r] = top[r];
    }
    __syncthreads();
    UNROLL for (int r = 0; r < ROWS; r++)
      UNROLL for (int w = 0; w < MERGE_WARPS; w++) top[r] = fmaxf(top[r], tops[w][r]);
    _Pragma("unroll 2") for (int i = first + warp; i <= last; i += MERGE_WARPS)
      UNROLL for (int r = 0; r < ROWS; r++) {
        if (row0 + r >= G) continue;
        const float2 ml = a.ml[p0 + i * step + r];
        const Vec<VEC> v = load_vec(a.o + (p0 + i * step + r) * D + lane * VEC);
        const float w = ml.y > 0.f ? ex2(ml.x - top[r]) : 0.f;
        l[r] = fmaf(ml.y, w, l[r]);
        UNROLL for (int k = 0; k < VEC; k++) acc[r].v[k] = fmaf(v.v[k], w, acc[r].v[k]);
      }
    UNROLL for (int r = 0; r < ROWS; r++) {
      UNROLL for (int k = 0; k < VEC; k++) part[warp][r][lane * VEC + k] = acc[r].v[k];
      if (lane == 0) part_l[warp][r] = l[r];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * D; i += MERGE_WARPS * 32) {
      const int r = i / D, c = i % D;
      float s = 0.f, t = 0.f;
      UNROLL for (int w = 0; w < MERGE_WARPS; w++) s += part[w][r][c], t += part_l[w][r];
      mean[r][c] = t > 0.f ? s / t : 0.f;
      if (c == 0 && a.lse != nullptr && row0 + r < G)
        a.lse[(i64)(f[3] + qi) * (HK * G) + head * G + row0 + r] =
            t > 0.f ? (top[r] + lg2(t)) * (1.f / LOG2E) : -__int_as_float(0x7f800000);
    }
    __syncthreads();
    UNROLL for (int r = 0; r < ROWS; r++) {
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
        const i64 at = ((i64)(f[3] + qi) * (HK * G) + head * G + row0 + r) * D + warp * OUT + keep;
        reinterpret_cast<u16*>(a.out)[at] = to_model(dot[0]);
      }
    }
    __syncthreads();
  }
}
