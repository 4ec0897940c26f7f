// What a warp sums up for its 8 columns (query token, head of the KV head). After work.cu.
//
// Lane (g, t) = (lane / 4, lane % 4). As MMA accumulator it holds tokens or channels g, g + 8 of
// columns 2t, 2t + 1; as query operand it holds column g.
struct Columns {
  float acc[NJ][4], m0, m1, l0, l1, z0, z1;
  bool unset0, unset1;                  // no visible token yet
  int g, t;

  DEV void clear() {
    UNROLL for (int j = 0; j < NJ; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
    m0 = m1 = l0 = l1 = z0 = z1 = 0.f;
    unset0 = unset1 = true;
  }
  // Rows of V of the windows come 16 bytes a lane, so acc[j] of the windows is in these channels.
  DEV int win_channel(int j, int e) const {
    return 32 * (j >> 1) + 8 * (g >> 1) + 4 * (j & 1) + 2 * e + (g & 1);
  }
  // ---- soft-max reference
  template <int U> DEV bool outgrown(const float (&x)[U][4], bool force) {
    float top = HIDDEN;
    UNROLL for (int u = 0; u < U; u++)
      top = fmaxf(top, fmaxf(fmaxf(x[u][0], x[u][1]), fmaxf(x[u][2], x[u][3])));
    return __any_sync(~0u, top > THRESHOLD || force);
  }
  // excess: log2 of what a token's probability must stay below 2^BIAS by
  template <int U, bool FIRST>
  DEV void move_reference(const float (&x)[U][4], const float (&excess)[U][2]) {
    float a0 = HIDDEN, a1 = HIDDEN;
    UNROLL for (int u = 0; u < U; u++)
      UNROLL for (int e = 0; e < 2; e++) {
        a0 = fmaxf(a0, x[u][2 * e] + excess[u][e]);
        a1 = fmaxf(a1, x[u][2 * e + 1] + excess[u][e]);
      }
    UNROLL for (int o = 4; o < 32; o <<= 1) {
      a0 = fmaxf(a0, __shfl_xor_sync(~0u, a0, o));
      a1 = fmaxf(a1, __shfl_xor_sync(~0u, a1, o));
    }
    const float f0 = shift<FIRST>(m0, unset0, a0), f1 = shift<FIRST>(m1, unset1, a1);
    l0 *= f0; l1 *= f1; z0 *= f0; z1 *= f1;
    UNROLL for (int j = 0; j < NJ; j++) {
      acc[j][0] *= f0; acc[j][1] *= f1; acc[j][2] *= f0; acc[j][3] *= f1;
    }
  }
  template <bool FIRST> DEV float shift(float& m, bool& unset, float top) {
    if (FIRST && unset) {
      if (top > HIDDEN * 0.5f) m = top - BIAS, unset = false;
      return 1.f;
    }
    const float d = fmaxf(top - BIAS, 0.f);
    m += d;
    return ex2(-d);
  }
  DEV void finish() {
    UNROLL for (int o = 4; o < 32; o <<= 1) {
      l0 += __shfl_xor_sync(~0u, l0, o); l1 += __shfl_xor_sync(~0u, l1, o);
      z0 += __shfl_xor_sync(~0u, z0, o); z1 += __shfl_xor_sync(~0u, z1, o);
    }
    m0 = unset0 ? HIDDEN : m0 - BIAS;
    m1 = unset1 ? HIDDEN : m1 - BIAS;
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int e = 0; e < 4; e++) acc[j][e] += ((e & 1) ? z1 : z0) * LO_UNIT;
  }
  // Add what this warp saved before (its windows).
  DEV void absorb(const float* o, const float2* ml) {
    const float2 a0 = ml[2 * t], a1 = ml[2 * t + 1];
    const float top0 = fmaxf(m0, a0.x), top1 = fmaxf(m1, a1.x);
    const float f0 = ex2(m0 - top0), f1 = ex2(m1 - top1);
    const float g0 = ex2(a0.x - top0), g1 = ex2(a1.x - top1);
    m0 = top0;
    m1 = top1;
    l0 = fmaf(l0, f0, a0.y * g0);
    l1 = fmaf(l1, f1, a1.y * g1);
    UNROLL for (int e = 0; e < 4; e++)
      UNROLL for (int j = 0; j < NJ; j++) {
        const float before = o[(2 * t + (e & 1)) * D + 16 * j + 8 * (e >> 1) + g];
        acc[j][e] = fmaf(acc[j][e], (e & 1) ? f1 : f0, before * ((e & 1) ? g1 : g0));
      }
    __syncwarp();                                   // `save` may write over what others still read
  }
  // o [columns][D] and ml [columns] of this warp's first column; n columns exist
  template <bool WINDOWS> DEV void save(float* o, float2* ml, int n) {
    UNROLL for (int e = 0; e < 4; e++) {
      const int c = 2 * t + (e & 1);
      if (c < n)
        UNROLL for (int j = 0; j < NJ; j++)
          o[c * D + (WINDOWS ? win_channel(j, e >> 1) : 16 * j + 8 * (e >> 1) + g)] = acc[j][e];
    }
    if (g == 0) {
      if (2 * t < n) ml[2 * t] = make_float2(m0, l0);
      if (2 * t + 1 < n) ml[2 * t + 1] = make_float2(m1, l1);
    }
    __syncwarp();
  }
};
