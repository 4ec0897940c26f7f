// Codes of rows: range, metadata, codes, packing; one warp per row. After common.cu and rows.cu; needs K_RANK, V_RANK (1:
// rank rule, 0: shrink rule), FEEDBACK (error feedback for K) and ACCURATE (and codec_accurate's search).
//
// Error feedback walks over blocks of VEC channels: the lane that owns a block finds its codes, then all lanes apply its
// errors.

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
template <bool RANK, int LEVELS = 3> DEV void row_range(const Row& y, float ratio, int rank, float& step, float& lo) {
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
  step = half_round(__fdiv_rn(__fsub_rn(high, low), (float)LEVELS));
  lo = half_round(low);
}
// A row's metadata, rounded to what a slot holds
struct RowMeta {
  float step, lo;
  u32 bytes;                                          // of COMPACT
  DEV u32 stored() const { return META_FORM == AFFINE || META_FORM == SCALE ? pack_half(step, lo) : bytes; }
};
#if META_FORM == COMPACT || META_FORM == POSITION
constexpr float PER_OCTAVE = META_FORM == COMPACT ? 16.f : 32.f;
DEV u32 to_byte(float x) { return __float_as_uint(fminf(fmaxf(x, 0.f), 255.f) + ROUND_MAGIC) & 255; }
// codec_compact's encode_meta and decode_meta, in the same order of operations; grid [3] of K or V
DEV u32 step_byte(float step, float step_log2) {
  return to_byte(__fmul_rn(__fsub_rn(log2f(fmaxf(step, 1.1754944e-38f)), step_log2), PER_OCTAVE));
}
DEV float step_of(u32 byte, float step_log2) { return exp2f(__fadd_rn(step_log2, byte * (1.f / PER_OCTAVE))); }
DEV u32 lo_byte(float lo, float first, float width) { return to_byte(__fdiv_rn(__fsub_rn(lo, first), width)); }
DEV float lo_of(u32 byte, float first, float width) { return __fadd_rn(first, __fmul_rn(byte, width)); }
DEV RowMeta storable(float step, float lo, const float* grid) {
  const float step_log2 = grid[0], lo_first = grid[1], lo_step = grid[2];
  const u32 s = step_byte(step, step_log2), l = lo_byte(lo, lo_first, lo_step);
  return {step_of(s, step_log2), lo_of(l, lo_first, lo_step), s | l << 8};
}
#elif META_FORM == AFFINE
DEV RowMeta storable(float step, float lo, const float* grid) { return {step, lo}; }
#endif
#if META_FORM == SCALE
// codec_lloyd: the root mean square, and the codes of y / scale
DEV RowMeta row_scale(const Row& y) {
  float sum = 0.f;
  UNROLL for (int k = 0; k < VEC; k++) sum = fmaf(y.v[k], y.v[k], sum);
  const float scale = half_round(__fsqrt_rn(warp_sum(sum) * (1.f / D)));
  return {scale, 0.f};
}
DEV void nearest_levels(const Row& y, u32 (&code)[VEC], float scale) {
  constexpr float THRESHOLD_OF_LEVELS = 8043.f / 8192;        // between INNER and OUTER; times an FP16 number: exact
  const float limit = scale * THRESHOLD_OF_LEVELS;
  UNROLL for (int k = 0; k < VEC; k++)
    code[k] = scale > 0.f ? (y.v[k] > -limit) + (y.v[k] > 0.f) + (y.v[k] > limit) : 1;
}
#endif
// Nearest code of u = w - lo: its bits are the lowest of the result, its value result - MAGIC.
// inverse: 1 / (LEVELS step)
template <int LEVELS = 3> DEV float nearest(float u, float inverse) {
  return fmaf(__saturatef(u * inverse), (float)LEVELS, ROUND_MAGIC);
}
// y becomes w - lo and then the codes' bits.
template <int LEVELS = 3> DEV void feedback(Row& y, u32 (&code)[VEC], float step, float inverse, const float* factor) {
  const int lane = threadIdx.x & 31;
  float f[VEC][VEC], ahead[VEC][VEC];
  UNROLL for (int i = 0; i < VEC; i++) load_shared<VEC>(f[i], factor + i * D + lane * VEC);
  _Pragma("unroll 2") for (int owner = 0; owner < 32; owner++) {
    const float* next = factor + (min(owner + 1, 31) * VEC) * D + lane * VEC;
    UNROLL for (int i = 0; i < VEC; i++) load_shared<VEC>(ahead[i], next + i * D);
    float u[VEC], error[VEC];
    UNROLL for (int k = 0; k < VEC; k++) u[k] = y.v[k];
    UNROLL for (int i = 0; i < VEC; i++) {
      const float biased = nearest<LEVELS>(u[i], inverse);
      if (lane == owner) code[i] = __float_as_uint(biased) & LEVELS;
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
constexpr float MAX_GAIN = 1.25f;
#if ACCURATE
// codec_accurate. The metric G is read through L1: beside the factor it would not fit into shared memory everywhere.
constexpr float LOW_RATIO = 0.75f, HIGH_RATIO = 0.85f;
DEV Row times_metric(const Row& x, const float* metric) {
  const int lane = threadIdx.x & 31;
  Row y;
  UNROLL for (int k = 0; k < VEC; k++) y.v[k] = 0.f;
  _Pragma("unroll 2") for (int owner = 0; owner < 32; owner++)
    UNROLL for (int i = 0; i < VEC; i++) {
      float row[VEC];
      load_shared<VEC>(row, metric + (owner * VEC + i) * D + lane * VEC);
      const float from = __shfl_sync(~0u, x.v[i], owner);
      UNROLL for (int k = 0; k < VEC; k++) y.v[k] = fmaf(from, row[k], y.v[k]);
    }
  return y;
}
// One pass of coordinate descent over the codes, in the order of the channels; gradient: (y - decoded) G, before and after.
DEV void sweep(Row& codes, Row& gradient, float step, const float* metric) {
  const int lane = threadIdx.x & 31;
  float inverse[VEC];
  UNROLL for (int k = 0; k < VEC; k++) {
    const float curvature = metric[(lane * VEC + k) * (D + 1)] * step;
    inverse[k] = curvature > 0.f ? __fdiv_rn(1.f, curvature) : 0.f;
  }
  _Pragma("unroll 2") for (int owner = 0; owner < 32; owner++) {
    float m[VEC][VEC], u[VEC], change[VEC];
    UNROLL for (int i = 0; i < VEC; i++) load_shared<VEC>(m[i], metric + (owner * VEC + i) * D + lane * VEC);
    UNROLL for (int k = 0; k < VEC; k++) u[k] = gradient.v[k];
    UNROLL for (int i = 0; i < VEC; i++) {
      const float to = fminf(fmaxf(fmaf(u[i], inverse[i], codes.v[i]), 0.f), 3.f);
      const float moved = __fsub_rn(__fadd_rn(to, ROUND_MAGIC), ROUND_MAGIC);
      change[i] = (moved - codes.v[i]) * step;
      if (lane == owner) codes.v[i] = moved;
      UNROLL for (int k = i + 1; k < VEC; k++) u[k] = fmaf(-change[i], m[i][k], u[k]);
    }
    UNROLL for (int i = 0; i < VEC; i++) {
      const float from = __shfl_sync(~0u, change[i], owner);
      UNROLL for (int k = 0; k < VEC; k++) gradient.v[k] = fmaf(-from, m[i][k], gradient.v[k]);
    }
  }
}
DEV RowMeta accurate(const Row& y, u32 (&code)[VEC], const float* factor, const float* metric, const float* grid) {
  RowMeta best = {};
  Row error;                                          // of the best codes, in the metric `energy`
  float energy = 0.f;
  _Pragma("unroll 1") for (int i = 0; i < 2; i++) {
    float step, lo;
    row_range<false>(y, i == 0 ? 0.5f * LOW_RATIO : 0.5f * HIGH_RATIO, 0, step, lo);
    const RowMeta meta = storable(step, lo, grid);
    Row w, codes, e;
    u32 bits[VEC];
    UNROLL for (int k = 0; k < VEC; k++) w.v[k] = y.v[k] - meta.lo;
    feedback(w, bits, meta.step, meta.step > 0.f ? __fdiv_rn(1.f, meta.step) * (1.f / 3.f) : 0.f, factor);
    auto errors = [&]() {
      UNROLL for (int k = 0; k < VEC; k++) e.v[k] = __fsub_rn(y.v[k], __fadd_rn(__fmul_rn(codes.v[k], meta.step), meta.lo));
    };
    UNROLL for (int k = 0; k < VEC; k++) codes.v[k] = (float)bits[k];
    errors();
    Row gradient = times_metric(e, metric);
    sweep(codes, gradient, meta.step, metric);
    errors();
    const float found = dot(e, gradient);
    if (i == 0 || found < energy) {
      best = meta, error = e, energy = found;
      UNROLL for (int k = 0; k < VEC; k++) code[k] = (u32)codes.v[k];
    }
  }
  // Scale about the centre so that decoded and true energy agree: decoded - centre is `from` - error.
  float low = y.v[0], high = y.v[0];
  UNROLL for (int k = 1; k < VEC; k++) low = fminf(low, y.v[k]), high = fmaxf(high, y.v[k]);
  low = -warp_max(-low);
  high = warp_max(high);
  const float centre = __fadd_rn(low, __fmul_rn(__fsub_rn(high, low), 0.5f));
  Row from;
  UNROLL for (int k = 0; k < VEC; k++) from.v[k] = y.v[k] - centre;
  const Row product = times_metric(from, metric);
  const float truth = dot(product, from), decoded = truth - 2.f * dot(product, error) + energy;
  float gain = decoded > 0.f ? __fsqrt_rn(__fdiv_rn(truth, decoded)) : 1.f;
  if (!(gain == gain)) gain = 1.f;                    // inf / inf
  gain = fminf(fmaxf(gain, 1.f / MAX_GAIN), MAX_GAIN);
  float step = best.step * gain, lo = __fadd_rn(centre, __fmul_rn(__fsub_rn(best.lo, centre), gain));
  if (META_FORM == AFFINE) step = half_round(step), lo = half_round(lo);
  return storable(step, lo, grid);
}
#endif
// BITS of a code. Lane l holds plane l / LANES of the halves VEC * (l % LANES) .. + VEC - 1.
template <int BITS> DEV void write_codes(u8* head_block, int token, int kv, const u32 (&code)[VEC], const RowMeta& meta) {
  constexpr int LANES = 2 * BITS;
  const int lane = threadIdx.x & 31, shift = BITS * (lane / LANES), part = lane % LANES;
  u32 w[VEC / 2];
  UNROLL for (int k = 0; k < VEC / 2; k++) {
    w[k] = (code[2 * k] << shift) | (code[2 * k + 1] << (16 + shift));
    UNROLL for (int o = LANES; o < 32; o <<= 1) w[k] |= __shfl_xor_sync(~0u, w[k], o);
  }
  const int byte = part * VEC * 2;
  u8* dst = head_block + kv * V_CODES + byte / 16 * CHUNK + token * 16 + byte % 16;
  if (lane < LANES) {
    if (VEC == 4) *reinterpret_cast<uint2*>(dst) = make_uint2(w[0], w[VEC / 2 - 1]);
    else *reinterpret_cast<u32*>(dst) = w[0];
  }
  if (lane == 4) {
    const u32 bits = meta.stored();
    u8* at = head_block + META + token * META_BYTES + kv * (META_BYTES / 2);
    if (META_BYTES == 8) *reinterpret_cast<u32*>(at) = bits;
    else *reinterpret_cast<u16*>(at) = (u16)bits;
  }
}

struct CodeArgs {
  u8* blocks;
  const float* factor;   // [HK, D, D] strictly upper triangular
  int k_rank, v_rank;
  float k_ratio, v_ratio;   // half the shrink ratio
  const float* grid;     // [HK, 2, 3], COMPACT
  const float* metric;   // [HK, D, D] symmetric, ACCURATE
};
#if META_FORM == CHANNEL   // encoded a page at a time, not here
template <bool KEY> DEV void store_codes(const CodeArgs&, int, i64, Row&, const float*) {}
#else
template <bool KEY> DEV void store_codes(const CodeArgs& a, int head, i64 slot, Row& y, const float* factor) {
  u32 code[VEC];
#if META_FORM == SCALE
  const RowMeta meta = row_scale(y);
  nearest_levels(y, code, meta.step);
#else
#if ACCURATE
  if (KEY) {
    const RowMeta meta = accurate(y, code, factor, a.metric + (i64)head * D * D, a.grid + head * 6);
    write_codes<2>(a.blocks + ((slot >> 4) * HK + head) * HB, (int)(slot & 15), 0, code, meta);
    return;
  }
#endif
  float step, lo;
  constexpr int LEVELS = KEY ? K_LEVELS : V_LEVELS;
  row_range<KEY ? K_RANK : V_RANK, LEVELS>(y, KEY ? a.k_ratio : a.v_ratio, KEY ? a.k_rank : a.v_rank, step, lo);
  const RowMeta meta = storable(step, lo, a.grid + (head * 2 + (KEY ? 0 : 1)) * 3);
  const float inverse = meta.step > 0.f ? __fdiv_rn(1.f, meta.step) * (1.f / LEVELS) : 0.f;
  UNROLL for (int k = 0; k < VEC; k++) y.v[k] -= meta.lo;
  if (KEY && FEEDBACK) feedback(y, code, meta.step, inverse, factor);
  else UNROLL for (int k = 0; k < VEC; k++) code[k] = __float_as_uint(nearest<LEVELS>(y.v[k], inverse)) & LEVELS;
#endif
  write_codes<KEY ? K_BITS : V_BITS>(a.blocks + ((slot >> 4) * HK + head) * HB, (int)(slot & 15), KEY ? 0 : 1, code, meta);
}
#endif
// A head's factor into shared memory; cp.async.wait_all and a barrier before its use.
DEV void fetch_factor(float* to, const CodeArgs& a, int head, int threads) {
  const float* from = a.factor + (i64)head * D * D;
  for (int i = threadIdx.x * 4; i < D * D; i += threads * 4) copy16(smem_addr(to + i), from + i);
}
