// Split-KV decode attention over sink | 2-bit history | recent. After common.cu; also needs SOFT_CAP,
// WIN_COST (plan.WINDOW_COST) and, for attend_warp, WARPS, STAGES, MIN_CTAS, PAGED (1: a page holds whole 16-slot blocks).
//
// What makes it fast (README.md has the derivations):
//  - a register of packed codes AND a mask is an MMA operand: two FP16 denormals c * 2^(2p-24);
//  - codes are the A operand and 8 columns (query token, head) the B operand;
//  - step and lo never touch elements: logits and probabilities are scaled instead;
//  - the soft-max reference moves only when a logit outgrows it by 2^THRESHOLD.

struct Args {
  float* o;              // [splits + B, HK, columns, D]
  float2* ml;            // [splits + B, HK, columns]
  const int* plan;
  const float* q;        // [T, HK * G, D]
  const u8* blocks;      // [N, HK, HB]
  const u16* sink_k;     // [R, n_sink, HK, D]
  const u16* sink_v;
  const u16* ring_k;     // [R, n_recent, HK, D]
  const u16* ring_v;
  const int* table;      // [R, table_stride]
  const float* r_v;      // [HK, D, D], for the merge kernel
  i64 table_stride;
  int batch, n_sink, n_recent, columns;
  float scale_log2, cap_log2;
};

// ---------------------------------------------------------------- work of a split
struct Segment {                 // what one split does for one request
  int b, row, seq_len, hist_end, q_start, q_len;
  int sink_chunks, chunk0, chunk1, tile0, tile1, stop;
};
DEV Segment segment(const Args& a, int b, int4 x, int4 y, int line, int line_end) {
  Segment s = {b, x.x, x.y, x.z, x.w, y.x};
  const int origin = y.y;
  s.stop = min(line_end, y.z);
  s.sink_chunks = div_up(min(s.seq_len, a.n_sink), WIN);
  const int recent = max(s.seq_len - max(a.n_sink, s.hist_end), 0);
  const int chunks = s.sink_chunks + div_up(recent, WIN);
  s.chunk0 = min(div_up(line - origin, WIN_COST), chunks);
  s.chunk1 = min(div_up(s.stop - origin, WIN_COST), chunks);
  const int tiles_from = origin + chunks * WIN_COST;
  s.tile0 = max(line - tiles_from, 0);
  s.tile1 = max(s.stop - tiles_from, s.tile0);
  return s;
}
// The segments of a split, in order: for (Work work(a, split); work.more();) { const Segment s = work.take(); ... }
struct Work {
  const Args& a;
  const int* fields;             // of the next segment's request
  int b, at, end;
  DEV Work(const Args& args, int split) : a(args) {
    const int* mine = a.plan + HEADER + a.batch * FIELDS + split * SPLIT;
    const int4 line = *reinterpret_cast<const int4*>(mine);
    fields = mine + 4;
    b = line.x;
    at = line.y;
    end = line.z;
  }
  DEV bool more() const { return at < end; }
  DEV Segment take() {
    const int4* f = reinterpret_cast<const int4*>(fields);
    const Segment s = segment(a, b++, f[0], f[1], at, end);
    at = s.stop;
    fields = a.plan + HEADER + b * FIELDS;
    return s;
  }
};

// ---------------------------------------------------------------- one warp: one KV head, 8 columns
// Lane (g, t) = (lane / 4, lane % 4). As MMA accumulator it holds tokens or channels g, g + 8 of
// columns 2t, 2t + 1; as query operand it holds column g.
DEV constexpr int plane(int j, int e) { return D == 128 ? j : 2 * j + e; }
DEV u32 codes_of(u32 w, int p) { return (p >= 5 ? w >> 10 : w) & (0x00030003u << (2 * (p % 5))); }
DEV float capped(float x, float cap_log2) {
  const float e = ex2(fabsf(x) * (-2.f * LOG2E / cap_log2));
  return copysignf(cap_log2 * __fdividef(1.f - e, 1.f + e), x);
}

struct Warp {
  u32 qb[NJ][2];                        // query as B operand of the history
  float unit, sum0, sum1;                   // unit of the products; sums of q of 2t, 2t + 1
  float acc[NJ][4], m0, m1, l0, l1, z0, z1;
  bool unset0, unset1;                  // no visible token yet
  float norm, inv_norm;                 // what q is multiplied by (0: no such column), its inverse
  const float* qr;                      // query row of column g
  int q_pos0, q_pos1;
  bool valid;
  int g, t;

  DEV void begin(const Args& a, const Segment& s, int head, int first_col) {
    const int lane = threadIdx.x & 31, col = first_col + (lane >> 2);
    g = lane >> 2;
    t = lane & 3;
    const int c0 = first_col + 2 * t;
    q_pos0 = s.seq_len - s.q_len + c0 / G;
    q_pos1 = s.seq_len - s.q_len + (c0 + 1) / G;
    valid = col < s.q_len * G;
    const int qi = valid ? col / G : 0;
    qr = a.q + ((i64)(s.q_start + qi) * (HK * G) + head * G + (valid ? col % G : 0)) * D;
    UNROLL for (int j = 0; j < NJ; j++) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
    m0 = m1 = l0 = l1 = z0 = z1 = 0.f;
    unset0 = unset1 = true;
    float top = 0.f;
    UNROLL for (int r = 0; r < D / 16; r++) {
      const float4 v = *reinterpret_cast<const float4*>(qr + 16 * r + 4 * t);
      top = fmaxf(top, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
    UNROLL for (int o = 1; o < 32; o <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    top *= a.scale_log2;
    // A power of two that brings all |q| below 2^7, so that no operand leaves FP16's range.
    const int e = max(-100, min(100, (int)((__float_as_uint(top) >> 23) & 255) - 127));
    norm = __uint_as_float((u32)(127 + 6 - e) << 23) * a.scale_log2;
    inv_norm = __uint_as_float((u32)(127 - 6 + e) << 23);
    if (!valid) norm = 0.f;
  }

  // ---- exact windows: 16 tokens whose rows this lane addresses as k0/v0 (token g), k1/v1 (g + 8)
  DEV void window_chunk(const Args& a, const u16* kbase, const u16* vbase, i64 at0, i64 at1,
                        int pos, int end) {
    const bool ok0 = pos + g < end, ok1 = pos + g + 8 < end;
    const uint4 none = {0, 0, 0, 0};
    float s[1][4] = {{0.f, 0.f, 0.f, 0.f}};
    uint4 k[D / 32][2], v[D / 32][2];
    UNROLL for (int r = 0; r < D / 32; r++) {       // channels 32r + 8t .. + 7
      k[r][0] = ok0 ? *reinterpret_cast<const uint4*>(kbase + at0 + 32 * r + 8 * t) : none;
      k[r][1] = ok1 ? *reinterpret_cast<const uint4*>(kbase + at1 + 32 * r + 8 * t) : none;
    }
    UNROLL for (int r = 0; r < D / 32; r++) {
      v[r][0] = ok0 ? *reinterpret_cast<const uint4*>(vbase + at0 + 32 * r + 8 * t) : none;
      v[r][1] = ok1 ? *reinterpret_cast<const uint4*>(vbase + at1 + 32 * r + 8 * t) : none;
    }
    UNROLL for (int r = 0; r < D / 32; r++) {
      const float4 x = *reinterpret_cast<const float4*>(qr + 32 * r + 8 * t);
      const float4 y = *reinterpret_cast<const float4*>(qr + 32 * r + 8 * t + 4);
      u32 hi[4], lo[4];
      split_window(x.x * norm, x.y * norm, hi[0], lo[0]);
      split_window(x.z * norm, x.w * norm, hi[1], lo[1]);
      split_window(y.x * norm, y.y * norm, hi[2], lo[2]);
      split_window(y.z * norm, y.w * norm, hi[3], lo[3]);
      mma_window(s[0], k[r][0].x, k[r][1].x, k[r][0].y, k[r][1].y, hi[0], hi[1]);
      mma_window(s[0], k[r][0].x, k[r][1].x, k[r][0].y, k[r][1].y, lo[0], lo[1]);
      mma_window(s[0], k[r][0].z, k[r][1].z, k[r][0].w, k[r][1].w, hi[2], hi[3]);
      mma_window(s[0], k[r][0].z, k[r][1].z, k[r][0].w, k[r][1].w, lo[2], lo[3]);
    }
    float x[1][4];
    auto logits = [&]() {
      UNROLL for (int e = 0; e < 2; e++) {
        const int p = pos + g + 8 * e;
        float y0 = s[0][2 * e] * inv_norm, y1 = s[0][2 * e + 1] * inv_norm;
        if (SOFT_CAP) y0 = capped(y0, a.cap_log2), y1 = capped(y1, a.cap_log2);
        x[0][2 * e] = p < end && p <= q_pos0 ? y0 + (BIAS - m0) : HIDDEN;
        x[0][2 * e + 1] = p < end && p <= q_pos1 ? y1 + (BIAS - m1) : HIDDEN;
      }
    };
    logits();
    const float no_excess[1][2] = {{0.f, 0.f}};
    if (outgrown(x, unset0 || unset1)) { move_reference<1, true>(x, no_excess); logits(); }
    u32 hi[2], lo[2];
    UNROLL for (int e = 0; e < 2; e++) {
      const float p0 = ex2(x[0][2 * e]), p1 = ex2(x[0][2 * e + 1]);
      l0 += p0;
      l1 += p1;
      split_window(p0, p1, hi[e], lo[e]);
      hi[e] = transpose8x8(hi[e]);
      lo[e] = transpose8x8(lo[e]);
    }
    UNROLL for (int r = 0; r < D / 32; r++) {
      pv_window(acc[2 * r], v[r][0].x, v[r][0].y, v[r][1].x, v[r][1].y, hi, lo);
      pv_window(acc[2 * r + 1], v[r][0].z, v[r][0].w, v[r][1].z, v[r][1].w, hi, lo);
    }
  }
  // Rows of V come 16 bytes a lane, so acc[j] of the windows is in the channels of win_channel.
  DEV static void pv_window(float (&c)[4], u32 a0, u32 a1, u32 b0, u32 b1, const u32 (&hi)[2],
                            const u32 (&lo)[2]) {
    a0 = transpose8x8(a0), a1 = transpose8x8(a1), b0 = transpose8x8(b0), b1 = transpose8x8(b1);
    mma_window(c, a0, a1, b0, b1, hi[0], hi[1]);
    mma_window(c, a0, a1, b0, b1, lo[0], lo[1]);
  }
  DEV int win_channel(int j, int e) const {
    return 32 * (j >> 1) + 8 * (g >> 1) + 4 * (j & 1) + 2 * e + (g & 1);
  }
  DEV void window(const Args& a, const Segment& s, int head, int chunk) {
    const bool sink = chunk < s.sink_chunks;
    const int from = sink ? 0 : max(a.n_sink, s.hist_end);
    const int pos = from + (sink ? chunk : chunk - s.sink_chunks) * WIN;
    const int end = sink ? min(s.seq_len, a.n_sink) : s.seq_len;
    const int rows = sink ? a.n_sink : a.n_recent;
    // Past the end the row of the last token stands in: never read, always addressable.
    const int p0 = min(pos + g, end - 1), p1 = min(pos + g + 8, end - 1);
    const int r0 = sink ? p0 : p0 % rows, r1 = sink ? p1 : p1 % rows;
    const i64 at0 = (((i64)s.row * rows + r0) * HK + head) * D;
    const i64 at1 = (((i64)s.row * rows + r1) * HK + head) * D;
    window_chunk(a, sink ? a.sink_k : a.ring_k, sink ? a.sink_v : a.ring_v, at0, at1, pos, end);
  }

  // ---- 2-bit history
  DEV void begin_history() {
    float sq = 0.f;
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int e = 0; e < 2; e++) {
        const float sc = (float)(1 << (8 - 2 * (plane(j, e) % 5)));
        const float2 v = *reinterpret_cast<const float2*>(qr + 16 * j + 8 * e + 2 * t);
        qb[j][e] = pack_half(v.x * norm * sc, v.y * norm * sc);
        const float2 r = unpack_half(qb[j][e]);
        sq += (r.x + r.y) * (1.f / sc);
      }
    sq += __shfl_xor_sync(~0u, sq, 1);
    sq += __shfl_xor_sync(~0u, sq, 2);
    sq *= inv_norm;
    sum0 = __shfl_sync(~0u, sq, t * 8);
    sum1 = __shfl_sync(~0u, sq, t * 8 + 4);
    unit = inv_norm * 65536.f;                      // 2^8 of the query, 2^-24 of the codes
  }
  DEV void end_history() {
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int e = 0; e < 4; e++)
        acc[j][e] *= (float)(1 << (24 - 2 * (plane(j, e >> 1) % 5)));
  }
  // SUB: bytes between the two blocks. Tokens outside [from, to) are hidden when EDGE. After the
  // FIRST tile every column has seen a token, so the flags of that need no registers in the loop.
  template <int SUB, bool EDGE, bool FIRST>
  DEV void history_tile(const Args& a, u32 base, int from, int to) {
    const int lane = threadIdx.x & 31;
    float s[2][4], x[2][4];
    uint2 md[2][2];
    u32 k[2][4], v[2][4];
    if (D == 128) {
      const u32 at = base + (lane >> 4) * CHUNK + (lane & 15) * 16;
      UNROLL for (int u = 0; u < 2; u++) ldsm(k[u], at + u * SUB);
    } else {
      ldsm(k[0], base + (lane >> 4) * SUB + (lane & 15) * 16);
    }
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int e = 0; e < 2; e++) md[u][e] = lds64(base + META + u * SUB + (g + 8 * e) * 8);
    UNROLL for (int u = 0; u < 2; u++) s[u][0] = s[u][1] = s[u][2] = s[u][3] = 0.f;
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int u = 0; u < 2; u++) {
        const int p = plane(j, 0), q = plane(j, 1);
        if (D == 128)
          mma(s[u], codes_of(k[u][0], p), codes_of(k[u][1], p), codes_of(k[u][2], p),
              codes_of(k[u][3], p), qb[j][0], qb[j][1]);
        else
          mma(s[u], codes_of(k[0][2 * u], p), codes_of(k[0][2 * u + 1], p),
              codes_of(k[0][2 * u], q), codes_of(k[0][2 * u + 1], q), qb[j][0], qb[j][1]);
      }
    float ks[2][2], kl[2][2];
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int e = 0; e < 2; e++) {
        const float2 m = unpack_half(md[u][e].x);
        ks[u][e] = m.x * unit;
        kl[u][e] = m.y;
      }
    auto logits = [&]() {
      const float r0 = BIAS - m0, r1 = BIAS - m1;
      UNROLL for (int u = 0; u < 2; u++)
        UNROLL for (int e = 0; e < 2; e++) {
          if (SOFT_CAP) {
            x[u][2 * e] = capped(fmaf(s[u][2 * e], ks[u][e], kl[u][e] * sum0), a.cap_log2) + r0;
            x[u][2 * e + 1] =
                capped(fmaf(s[u][2 * e + 1], ks[u][e], kl[u][e] * sum1), a.cap_log2) + r1;
          } else {
            x[u][2 * e] = fmaf(s[u][2 * e], ks[u][e], fmaf(kl[u][e], sum0, r0));
            x[u][2 * e + 1] = fmaf(s[u][2 * e + 1], ks[u][e], fmaf(kl[u][e], sum1, r1));
          }
          if (EDGE) {                               // stale metadata may be NaN, codes never are
            const int i = 16 * u + g + 8 * e;
            if (i < from || i >= to) x[u][2 * e] = x[u][2 * e + 1] = HIDDEN, md[u][e].y = 0;
          }
        }
    };
    logits();
    const u32 steps = 0xFFFF & max_u16x2(max_u16x2(md[0][0].y, md[0][1].y),
                                         max_u16x2(md[1][0].y, md[1][1].y));
    if (outgrown(x, steps > BIG_STEP || (FIRST && (unset0 || unset1)))) {
      float excess[2][2];
      UNROLL for (int u = 0; u < 2; u++)
        UNROLL for (int e = 0; e < 2; e++)
          excess[u][e] = fmaxf(0.f, lg2(unpack_half(md[u][e].y).x) - 7.f);
      move_reference<2, FIRST>(x, excess);
      logits();
    }
    if (FIRST) unset0 = unset1 = false;
    if (D == 128) {
      const u32 at = base + (2 + ((lane >> 3) & 1)) * CHUNK + ((lane & 7) + 8 * (lane >> 4)) * 16;
      UNROLL for (int u = 0; u < 2; u++) ldsm_t(v[u], at + u * SUB);
    } else {
      ldsm_t(v[0], base + CHUNK + (lane >> 4) * SUB + (lane & 15) * 16);
    }
    u32 pb[2][2];
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int e = 0; e < 2; e++) {
        const float p0 = ex2(x[u][2 * e]), p1 = ex2(x[u][2 * e + 1]);
        const u32 m = md[u][e].y;
        const float lo = unpack_half(m).y;
        l0 += p0;
        l1 += p1;
        z0 = fmaf(p0, lo, z0);
        z1 = fmaf(p1, lo, z1);
        pb[u][e] = transpose8x8(mul_half2(pack_half(p0, p1), __byte_perm(m, m, 0x1010)));
      }
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int j = 0; j < NJ; j++) {
        const int p = plane(j, 0), q = plane(j, 1);
        if (D == 128)
          mma(acc[j], codes_of(v[u][0], p), codes_of(v[u][1], p), codes_of(v[u][2], p),
              codes_of(v[u][3], p), pb[u][0], pb[u][1]);
        else
          mma(acc[j], codes_of(v[0][2 * u], p), codes_of(v[0][2 * u], q),
              codes_of(v[0][2 * u + 1], p), codes_of(v[0][2 * u + 1], q), pb[u][0], pb[u][1]);
      }
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
      UNROLL for (int e = 0; e < 4; e++) acc[j][e] += (e & 1) ? z1 : z0;
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

DEV int warp_id() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }
DEV int tile_base(const Args& a, int tile) { return (a.n_sink & ~15) + tile * TILE; }
template <int SUB, bool FIRST>
DEV void visit_tile(Warp& w, const Args& a, const Segment& s, u32 base, int tile) {
  const int pos = tile_base(a, tile), to = s.hist_end - pos;
  if (FIRST) w.history_tile<SUB, true, true>(a, base, a.n_sink - pos, to);
  else if (to >= TILE) w.history_tile<SUB, false, false>(a, base, 0, TILE);
  else w.history_tile<SUB, true, false>(a, base, 0, to);
}
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
    asm volatile("prefetch.global.L2 [%0];" ::"l"(base + at + 64 * i));
}
// The merge kernel reads R_V next: bring it into L2, a few lines a CTA.
DEV void prefetch_rotation(const Args& a) {
  constexpr int LINES = HK * D * D / 32;
  const int ctas = gridDim.x * gridDim.y * gridDim.z;
  const int cta = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  for (int i = cta * 32 + (int)threadIdx.x; threadIdx.x < 32 && i < LINES; i += ctas * 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(a.r_v + (i64)i * 32));
}
DEV i64 partial_at(const Args& a, int split, int b, int head, int col) {
  return ((i64)(split + b) * HK + head) * a.columns + col;
}

// ---------------------------------------------------------------- one CTA per 8 KV heads
// A producer warp brings tiles of all 8 heads (2 bulk copies of 8 * HB bytes); warp w works on
// head w. Best when the batch alone fills the GPU: whole runs of DRAM in order.
#if __CUDA_ARCH__ >= 900 && KV_HEADS % 8 == 0 && PAGED
constexpr int CTA_STAGES = 3;
extern "C" __global__ __launch_bounds__(288, 2) void attend_cta(const __grid_constant__ Args a) {
  constexpr int SUB = 8 * HB, STAGE = 2 * SUB;
  extern __shared__ __align__(128) u8 smem[];
  const int split = blockIdx.x, head0 = blockIdx.y * 8, first_col = blockIdx.z * COLS;
  const int warp = warp_id(), lane = threadIdx.x & 31;
  const u32 buf = smem_addr(smem), full = buf + CTA_STAGES * STAGE, empty = full + CTA_STAGES * 8;
  if (threadIdx.x == 0) {
    for (int i = 0; i < CTA_STAGES; i++) bar_init(full + i * 8, 1), bar_init(empty + i * 8, 8);
    bar_init_fence();
  }
  __syncthreads();
  release_next_kernel();
  prefetch_rotation(a);
  int st = 0;
  u32 phase = 0;
  if (warp == 8) {                // plan, table and visible history are older than the last kernel
    for (Work work(a, split); work.more();) {
      const Segment s = work.take();
      const int* row = a.table + s.row * a.table_stride;
      // Lanes 0 and 1 look after the two blocks of a tile.
      auto slot_of = [&](int tile) { return __ldg(row + min(tile_base(a, tile) + (lane & 1) * 16, s.hist_end - 1)); };
      int next = s.tile0 < s.tile1 ? slot_of(s.tile0) : 0;
      for (int tile = s.tile0; tile < s.tile1; tile++) {
        const int slot = next;
        if (tile + 1 < s.tile1) next = slot_of(tile + 1);
        bar_wait(empty + st * 8, phase ^ 1);
        if (lane == 0) bar_expect(full + st * 8, STAGE);
        __syncwarp();
        if (lane < 2)
          bulk_copy(buf + st * STAGE + lane * SUB, a.blocks + ((i64)(slot >> 4) * HK + head0) * HB, SUB, full + st * 8);
        if (++st == CTA_STAGES) st = 0, phase ^= 1;
      }
    }
    return;
  }
  const int head = head0 + warp;
  float* stash = reinterpret_cast<float*>(smem + CTA_STAGES * STAGE + 64) + warp * COLS * D;
  float2* stash_ml = reinterpret_cast<float2*>(smem + CTA_STAGES * STAGE + 64 + 8 * COLS * D * 4) + warp * COLS;
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
      w.begin_history();
      auto consume = [&](auto first, int tile) {
        bar_wait(full + st * 8, phase);
        visit_tile<SUB, decltype(first)::value>(w, a, s, buf + st * STAGE + warp * HB, tile);
        __syncwarp();
        if (lane == 0) bar_arrive(empty + st * 8);
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
  extern __shared__ __align__(128) u8 smem[];
  const int head = blockIdx.x, split = blockIdx.y, first_col = blockIdx.z * COLS;
  const int warp = warp_id(), lane = threadIdx.x & 31;
  const u32 buf = smem_addr(smem) + warp * STAGES * STAGE;
  float* sm_o = reinterpret_cast<float*>(smem + WARPS * STAGES * STAGE);   // [WARPS][COLS][D]
  float2* sm_ml = reinterpret_cast<float2*>(sm_o + WARPS * COLS * D);      // [WARPS][COLS]
#if PAGED
  const u32 full = smem_addr(sm_ml + WARPS * COLS) + warp * STAGES * 8;
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
    const int tile0 = s.tile0 + warp, n = max(0, div_up(s.tile1 - tile0, WARPS));
#if PAGED
    auto slot_of = [&](int i) { return __ldg(row + min(tile_base(a, tile0 + i * WARPS) + (lane & 1) * 16, s.hist_end - 1)); };
    auto issue = [&](int slot) {
      const u32 bar = full + issue_st * 8;
      if (lane == 0) bar_expect(bar, STAGE);
      __syncwarp();
      if (lane < 2)
        bulk_copy(buf + issue_st * STAGE + lane * HB, a.blocks + ((i64)(slot >> 4) * HK + head) * HB, HB, bar);
      if (++issue_st == STAGES) issue_st = 0;
    };
#else
    auto slot_of = [&](int i) {
      return __ldg(row + min(max(tile_base(a, tile0 + i * WARPS) + lane, a.n_sink), s.hist_end - 1));
    };
    auto issue = [&](int slot) {
      const u8* src = a.blocks + ((i64)(slot >> 4) * HK + head) * HB;
      const u32 dst = buf + issue_st * STAGE + (lane >> 4) * HB;
      UNROLL for (int c = 0; c < D / 32; c++)
        copy16(dst + c * CHUNK + (lane & 15) * 16, src + c * CHUNK + (slot & 15) * 16);
      copy8(dst + META + (lane & 15) * 8, src + META + (slot & 15) * 8);
      if (++issue_st == STAGES) issue_st = 0;
    };
    auto commit = []() { asm volatile("cp.async.commit_group;" ::: "memory"); };
#endif
    UNROLL for (int i = 0; i < STAGES - 1; i++) {
      if (i < n) issue(slot_of(i));
#if !PAGED
      commit();
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
      w.begin_history();
      auto consume = [&](auto first, int i) {
#if PAGED
        bar_wait(full + st * 8, phase);
#else
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
#endif
        __syncwarp();
        if (i + STAGES - 1 < n) {
          const int slot = next;
          if (i + STAGES < n) next = slot_of(i + STAGES);
          issue(slot);
        }
#if !PAGED
        commit();
#endif
        visit_tile<HB, decltype(first)::value>(w, a, s, buf + st * STAGE, tile0 + i * WARPS);
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
