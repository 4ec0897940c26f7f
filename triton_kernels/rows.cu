// Rows of K, V and q: rotation, 2-bit codes, packing. After common.cu; with K_RANK, V_RANK (1: rank
// rule, 0: shrink rule), FEEDBACK (error feedback for K) and ACCURATE (and codec_accurate's search) it
// also encodes. ROWS: of a tile of an MMA; HALF_STRIDE: of a row of FP16 in shared memory.
//
// Rotation: x is exact in 16 bits and R is the sum of three 16-bit matrices, so three MMAs give
// float32 accuracy (two for queries, which are not quantised); a warp keeps the fragments of 8
// columns of R in registers. Codes, one warp per row: range, codes, packing. Error feedback walks
// over blocks of VEC channels: the lane that owns a block finds its codes, then all lanes apply its
// errors.

constexpr int VEC = D / 32, KSTEPS = D / 16;
constexpr float ROUND_MAGIC = 12582912.f;             // 1.5 * 2^23: adding it rounds to even
constexpr float MAX_HALF = 65504.f, MAX_FLOAT = 3.4028235e38f;
#if WINDOW_BF16
constexpr float R_SCALE = 1.f;
#else
// Keeps the low parts of R normal in FP16; a matrix that is not orthogonal has larger elements.
constexpr float R_SCALE = META_FORM == POSITION ? 256.f : 4096.f;
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

// A column of a matrix of FP16, which is a row of the transposed one, as B operand
struct HalfColumn {
  uint4 c[D / 32];
  DEV void load(const u16* column, int t) {
    UNROLL for (int r = 0; r < D / 32; r++) c[r] = *reinterpret_cast<const uint4*>(column + 32 * r + 8 * t);
  }
};
// 16 FP16 rows times 8 FP16 columns, of which a lane holds the one numbered g; float32
DEV void multiply_half(float (&y)[4], const Rows& rows, const HalfColumn& column) {
  float odd[4] = {0.f, 0.f, 0.f, 0.f};
  UNROLL for (int e = 0; e < 4; e++) y[e] = 0.f;
  UNROLL for (int r = 0; r < D / 32; r++) {
    const uint4 u = rows.x[r][0], v = rows.x[r][1], c = column.c[r];
    mma(y, u.x, v.x, u.y, v.y, c.x, c.y);
    mma(odd, u.z, v.z, u.w, v.w, c.z, c.w);
  }
  UNROLL for (int e = 0; e < 4; e++) y[e] += odd[e];
}

// ---- one warp, one row: lane l holds channels VEC * l .. + VEC - 1
struct Row { float v[VEC]; };
DEV float warp_max(float x) {
  UNROLL for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
DEV float warp_sum(float x) {
  UNROLL for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
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
DEV float dot(const Row& x, const Row& y) {
  float sum = 0.f;
  UNROLL for (int k = 0; k < VEC; k++) sum = fmaf(x.v[k], y.v[k], sum);
  return warp_sum(sum);
}
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
DEV void write_model_row(u16* dst, const Row& y) {
  const int lane = threadIdx.x & 31;
  u32 w[VEC / 2];
  UNROLL for (int k = 0; k < VEC / 2; k++) w[k] = pack_window(y.v[2 * k], y.v[2 * k + 1]);
  if (VEC == 4) *reinterpret_cast<uint2*>(dst + lane * VEC) = make_uint2(w[0], w[VEC / 2 - 1]);
  else *reinterpret_cast<u32*>(dst + lane * VEC) = w[0];
}
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
// What codec_position needs besides (means.py). `rotate` computes shares, from k; merge.cu reads them.
struct MeanArgs {
  float* shares;         // [T, HK]: mean_share
  const u16* k;          // [T, HK, D] of the model, token stride below
  i64 stride_k;
  const i64* positions;  // [T]
  const u16* turns;      // [tiles, D] FP16: a position's cosines and sines
  const u16* lift;       // [HK, D, D] FP16, transposed
  const float* mix;      // [HK, 2, D]: C(x) of a key or query x
  const int* partner;    // [D]
  const float* units;    // [HK, 2]: 1 / |m|^2, unit of lift
  const u16* metric;     // [HK, D, D] FP16, symmetric
};
#if META_FORM == POSITION
DEV const u16* turn_of(const MeanArgs& m, int token) { return m.turns + (m.positions[token] >> 4) * D; }
// What C(x) makes two channels of, and the two of x
struct Mix {
  float2 own, other;
  int2 partner;
  DEV void load(const MeanArgs& m, int head, int channel) {
    const float* mix = m.mix + head * 2 * D + channel;
    own = *reinterpret_cast<const float2*>(mix);
    other = *reinterpret_cast<const float2*>(mix + D);
    partner = *reinterpret_cast<const int2*>(m.partner + channel);
  }
  DEV float2 of(const u16* x, int channel) const {
    const float2 a = unpack_window(*reinterpret_cast<const u32*>(x + channel));
    const float2 b = unpack_window(x[partner.x] | (u32)x[partner.y] << 16);
    return make_float2(fmaf(other.x, b.x, own.x * a.x), fmaf(other.y, b.y, own.y * a.y));
  }
};
// a of a token's key, before it is rounded
DEV float mean_share(const MeanArgs& m, int head, int token) {
  const int channel = (threadIdx.x & 31) * VEC;
  const u16* k = m.k + token * m.stride_k + head * D;
  const u16* turn = turn_of(m, token) + channel;
  float sum = 0.f;
  UNROLL for (int i = 0; i < VEC; i += 2) {
    Mix mix;
    mix.load(m, head, channel + i);
    const float2 t = unpack_half(*reinterpret_cast<const u32*>(turn + i)), x = mix.of(k, channel + i);
    sum = fmaf(t.x, x.x, fmaf(t.y, x.y, sum));
  }
  return warp_sum(sum) * m.units[head * 2];
}
// A key on its way to its codes
struct Key {
  Row y;                 // what is coded
  float step;
  u32 share;             // byte of a
};
// y: the rotated key, u: its position's row of lift, share: mean_share. Leaves y / step in FP16 at `half`, a row of the
// tile of which `finish_key` wants the product with the metric.
DEV Key begin_key(const CodeArgs& c, const MeanArgs& m, int head, float share, const Row& y, const Row& u, u16* half) {
  const int lane = threadIdx.x & 31;
  const float* grid = c.grid + head * 6;
  const float unit = m.units[head * 2 + 1];
  Key key;
  key.share = lo_byte(share, grid[1], grid[2]);
  share = lo_of(key.share, grid[1], grid[2]);
  UNROLL for (int i = 0; i < VEC; i++) key.y.v[i] = __fsub_rn(y.v[i], __fmul_rn(share, __fmul_rn(u.v[i], unit)));
  constexpr float SPREAD = 2.f * (K_BITS == 4 ? 2.7f : 1.6f) / K_LEVELS;
  const float step = __fmul_rn(__fsqrt_rn(dot(key.y, key.y) * (1.f / D)), SPREAD);
  key.step = step_of(step_byte(step, grid[0]), grid[0]);
  const float inverse = __fdiv_rn(1.f, key.step);
  UNROLL for (int i = 0; i < VEC; i += 2)
    *reinterpret_cast<u32*>(half + lane * VEC + i) = pack_half(key.y.v[i] * inverse, key.y.v[i + 1] * inverse);
  return key;
}
// g: y times the metric, in any unit
DEV void finish_key(const CodeArgs& c, int head, i64 slot, const Key& key, const Row& g, const float* factor) {
  const float* grid = c.grid + head * 6;
  const float lo = -0.5f * K_LEVELS * key.step;
  Row w, decoded;
  u32 code[VEC];
  UNROLL for (int i = 0; i < VEC; i++) w.v[i] = __fsub_rn(key.y.v[i], lo);
  feedback<K_LEVELS>(w, code, key.step, __fdiv_rn(1.f, key.step) * (1.f / K_LEVELS), factor);
  UNROLL for (int i = 0; i < VEC; i++) decoded.v[i] = fmaf((float)code[i], key.step, lo);
  const float truth = dot(key.y, g), found = dot(decoded, g);
  float gain = found > 0.f && fabsf(truth) <= MAX_FLOAT ? __fdiv_rn(truth, found) : 1.f;
  gain = fminf(fmaxf(gain, 1.f / MAX_GAIN), MAX_GAIN);
  const u32 bytes = step_byte(key.step * gain, grid[0]) | key.share << 8;
  write_codes<K_BITS>(c.blocks + ((slot >> 4) * HK + head) * HB, (int)(slot & 15), 0, code, {key.step, lo, bytes});
}
// The tile of 16 FP16 rows between the two, padded so that a warp reads it without conflicts.
DEV void load_half_rows(Rows& rows, const u16* tile, int g, int t, bool upper) {
  load_rows(rows, tile + g * HALF_STRIDE, upper ? tile + (g + 8) * HALF_STRIDE : nullptr, t);
}
#endif
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
// Where fresh rows go besides the history.
struct WindowArgs {
  const i64* rows;       // [T]
  const i64* positions;
  const i64* ends;
  const i64* slots;
  const i64* cache_index;
  u16* sink_k;
  u16* sink_v;
  u16* ring_k;
  u16* ring_v;
  u16* cache_k;
  u16* cache_v;
  int n_sink, n_recent;
};
// write(row) for the window rows of a token that has a slot
template <bool KEY, class F> DEV void each_window(const WindowArgs& a, int head, int token, F write) {
  const i64 row = a.rows[token], pos = a.positions[token], cached = a.cache_index[token];
  if (pos < a.n_sink) write((KEY ? a.sink_k : a.sink_v) + ((row * a.n_sink + pos) * HK + head) * D);
  if (pos >= a.ends[token] - a.n_recent)
    write((KEY ? a.ring_k : a.ring_v) + ((row * a.n_recent + pos % a.n_recent) * HK + head) * D);
  if (cached >= 0) write((KEY ? a.cache_k : a.cache_v) + (cached * HK + head) * D);
}
