// Keys of codec_position: the share of the mean, codes of what is left, the gain. After common.cu, rows.cu and codes.cu;
// needs HALF_STRIDE of a row of FP16 in shared memory.

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
