// Codes and metadata of history tokens as attend reads them. After common.cu. META_FORM (tile.FORMS) says what the
// metadata of a token are:
//
//   AFFINE   FP16: K step, K lo, V step, V lo            value = code * step + lo
//   COMPACT  the same four numbers, a byte each          codec_compact: step on a log scale
//   POSITION COMPACT, a finer scale, K's lo is a:         K = (code - 3/2) * step + a * w, w being its position's mean
//                                                        (codec_position), whose product with q is Warp::enter_group's
//   SCALE    FP16: K scale, V scale                      value = level[code] * scale (codec_lloyd)
//   CHANNEL  FP16: K norm, V step, V lo                  K = (code * step + lo) * norm with step and lo per channel of
//                                                        a page (codec_omni), which Warp::enter_page folds into q

// Halves of a row, 16 of them a set of operands, or half a set; the plane that holds channels 16 j + 8 e ..
DEV constexpr int halves(int bits) { return D * bits / 16; }
DEV constexpr int sets(int bits) { return halves(bits) > 16 ? 2 : 1; }
template <int BITS> DEV constexpr int plane(int j, int e) { return halves(BITS) == 8 ? 2 * j + e : j / sets(BITS); }
template <int BITS> DEV u32 codes_of(u32 w, int p) {
  if (BITS == 4) return (p >= 2 ? w >> 8 : w) & (0x000F000Fu << (4 * (p % 2)));
  return (p >= 5 ? w >> 10 : w) & (0x00030003u << (2 * (p % 5)));
}

// operand(w, p): what enters the MMA for plane p, integers * 2^(plane_shift(p) - 24). One of them is worth VALUE_UNIT.
// BITS: of K's codes or of V's.
#if META_FORM == SCALE
// Levels are -10, -3, 3, 10: codec_lloyd's within 2.6e-4 of a scale (RMS over a Gaussian, whose least squares give the
// unit). code * 20/3 - 10, rounded to an integer, is exactly that; and one FP16 multiply-add rounds to integers,
// because these are multiples of the least FP16 number, 2^-24.
constexpr float VALUE_UNIT = 0.151057f;
template <int BITS> DEV constexpr int plane_shift(int p) { return 0; }
template <int BITS> DEV u32 operand(u32 w, int p) {
  const u32 ratio = 0x46AB46ABu - 0x08000800u * (p % 5);      // 20/3 / 4^(p % 5)
  return fma_half2(codes_of<2>(w, p), ratio, 0x800A800Au);       // - 10 * 2^-24
}
#else
constexpr float VALUE_UNIT = 1.f;
template <int BITS> DEV constexpr int plane_shift(int p) { return BITS == 4 ? 4 * (p % 2) : 2 * (p % 5); }
template <int BITS> DEV u32 operand(u32 w, int p) { return codes_of<BITS>(w, p); }
#endif
constexpr bool BYTES = META_FORM == COMPACT || META_FORM == POSITION;
constexpr bool K_LO = META_FORM == AFFINE || BYTES;   // a token's keys have a lo of their own
constexpr bool V_LO = META_FORM != SCALE;
constexpr float LO_UNIT = BYTES ? 1048576.f : 1.f;    // what Decoder's lo count in

// Token: metadata as they are stored, of token row + more of a block, where a lane's `row` never changes. Decoder: what
// they mean; `products` is the unit of the products of K, `zero` is Args::zero. What value_lo gives a token counts in
// a unit of its own: `offset` is the sum of p * lo, of z = sum of p * value_lo and l = sum of p, over LO_UNIT. V's step
// must stay below BIG_STEP = 2^BIG_STEP_LOG2, or move_reference has to make room for p * step in FP16.
constexpr float BIG_STEP_LOG2 = 7.f;
constexpr u32 BIG_STEP = 0x5800;          // 128.0 in FP16
#if META_FORM == AFFINE || META_FORM == CHANNEL
struct Token {
  u32 k, v;                               // K's and V's step, lo; of CHANNEL k's low half is the norm
#if META_FORM == AFFINE
  DEV void load(u32 meta, int row, int more) {
    const uint2 m = lds64(meta + (row + more) * 8);
    k = m.x, v = m.y;
  }
#else
  DEV void load(u32 meta, int row, int more) {          // 6 bytes of two aligned words; `more` is even
    const u32 at = meta + (row * 6 & ~3) + more * 6, x = lds32(at), y = lds32(at + 4);
    k = __byte_perm(x, 0, row & 1 ? 0x4432 : 0x4410);
    v = __byte_perm(x, y, row & 1 ? 0x7654 : 0x5432);
  }
#endif
  DEV void hide() { v = 0; }              // stale metadata may be NaN
};
struct Decoder {
  float unit;
  DEV void begin(const float* grid, float products, int zero) { unit = products; }
  DEV float2 key(const Token& m) const {
    const float2 k = unpack_half(m.k);
    return make_float2(k.x * unit, k.y);
  }
  DEV float value_lo(const Token& m) const { return unpack_half(m.v).y; }
  DEV float offset(float z, float l) const { return z; }
  DEV u32 weights(const Token& m, float p0, float p1) const {
    return mul_half2(pack_half(p0, p1), __byte_perm(m.v, m.v, 0x1010));
  }
  DEV bool big(const Token (&m)[2][2]) const {
    return (0xFFFF & max_u16x2(max_u16x2(m[0][0].v, m[0][1].v), max_u16x2(m[1][0].v, m[1][1].v))) > BIG_STEP;
  }
  DEV float value_log2(const Token& m) const { return lg2(unpack_half(m.v).x); }
};
#elif META_FORM == SCALE
struct Token {
  u32 w;                                  // of K, of V
  DEV void load(u32 meta, int row, int more) { w = lds32(meta + (row + more) * 4); }
  DEV void hide() { w &= 0xFFFF; }
};
struct Decoder {
  float unit;
  DEV void begin(const float* grid, float products, int zero) { unit = products; }
  DEV float2 key(const Token& m) const { return make_float2(unpack_half(m.w).x * unit, 0.f); }
  DEV float value_lo(const Token& m) const { return 0.f; }
  DEV float offset(float z, float l) const { return z; }
  DEV u32 weights(const Token& m, float p0, float p1) const {
    return mul_half2(pack_half(p0, p1), __byte_perm(m.w, m.w, 0x3232));
  }
  DEV bool big(const Token (&m)[2][2]) const {
    return max_u16x2(max_u16x2(m[0][0].w, m[0][1].w), max_u16x2(m[1][0].w, m[1][1].w)) >> 16 > BIG_STEP;
  }
  DEV float value_log2(const Token& m) const { return lg2(unpack_half(m.w).y); }
};
#elif META_FORM == COMPACT || META_FORM == POSITION
// Byte i of w without a conversion, because it lies in a mantissa: as FROM + byte / PER_OCTAVE (FROM goes into the
// constants below, which shifts a step by 4e-5 of itself at most), and as byte * 2^-133, exactly.
constexpr float FROM = META_FORM == COMPACT ? 2048.f : 1024.f;       // 2^15 / PER_OCTAVE
constexpr u32 FROM_BITS = META_FORM == COMPACT ? 0x45000000u : 0x44800000u;
constexpr u32 FROM_BYTES = META_FORM == COMPACT ? 0x7404 : 0x7604;   // its upper bytes that are not 0
DEV float subnormal(u32 w, int i) { return __uint_as_float(__byte_perm(w, 0, 0x4044 | i << 8)); }
struct Token {
  u32 w;
  DEV void load(u32 meta, int row, int more) { w = lds32(meta + (row + more) * 4); }
  DEV void hide() {}                      // any byte is a finite number
};
struct Decoder {
  float step_log2[2], lo_first[2], lo_step[2];          // of K (with the unit of its products), of V
  float big_from;                                       // what octaves() of a big step of V exceeds
  u32 exponent;                                         // of FROM
  DEV void begin(const float* grid, float products, int zero) {      // [2, 3] of the head
    // Two of them as if lanes differed: an instruction takes one uniform operand, the other was moved for each token.
    const u32 lane = threadIdx.x & zero;
    exponent = FROM_BITS | lane;
    UNROLL for (int kv = 0; kv < 2; kv++) {
      step_log2[kv] = grid[3 * kv] + (kv == 0 ? lg2(products) : 0.f) - FROM;
      lo_first[kv] = grid[3 * kv + 1] * (1.f / LO_UNIT);
      lo_step[kv] = grid[3 * kv + 2 + lane] * 1.0384593717069655e34f;       // 2^133 / LO_UNIT
    }
    big_from = BIG_STEP_LOG2 - step_log2[1];
  }
  DEV float octaves(u32 w, int i) const { return __uint_as_float(__byte_perm(w, exponent, FROM_BYTES | i << 4)); }
  DEV float2 key(const Token& m) const {
    return make_float2(ex2(octaves(m.w, 0) + step_log2[0]), fmaf(subnormal(m.w, 1), lo_step[0], lo_first[0]));
  }
  DEV float value_lo(const Token& m) const { return subnormal(m.w, 3); }
  DEV float offset(float z, float l) const { return fmaf(z, lo_step[1], l * lo_first[1]); }
  DEV u32 weights(const Token& m, float p0, float p1) const {
    const float step = ex2(value_log2(m));
    return pack_half(p0 * step, p1 * step);
  }
  DEV bool big(const Token (&m)[2][2]) const {
    const float top = fmaxf(fmaxf(octaves(m[0][0].w, 2), octaves(m[0][1].w, 2)),
                            fmaxf(octaves(m[1][0].w, 2), octaves(m[1][1].w, 2)));
    return top > big_from;
  }
  DEV float value_log2(const Token& m) const { return octaves(m.w, 2) + step_log2[1]; }
};
#endif
