// Attention of one warp: its columns over windows and history of one KV head. After columns.cu; needs SOFT_CAP.

DEV float capped(float x, float cap_log2) {
  const float e = ex2(fabsf(x) * (-2.f * LOG2E / cap_log2));
  return copysignf(cap_log2 * __fdividef(1.f - e, 1.f + e), x);
}

struct Warp : Columns {
  u32 qb[NJ][2];                        // query as B operand of the history; with Q_SHARED only until it is there
  float sum0, sum1;                     // sums of q of 2t, 2t + 1
  Decoder decoder;
  u32 read;                             // bits of the last tile's codes of V, see stage_read
  float norm, inv_norm;                 // what q is multiplied by (0: no such column), its inverse
  const float* qr;                      // query row of column g
  int q_pos0, q_pos1;
  bool valid;

  DEV void begin(const Args& a, const Segment& s, int head, int first_col) {
    const int lane = threadIdx.x & 31, col = first_col + (lane >> 2);
    g = lane >> 2;
    t = lane & 3;
    const int c0 = first_col + 2 * t;
    q_pos0 = s.seq_len - s.q_len + c0 / G;
    q_pos1 = s.seq_len - s.q_len + (c0 + 1) / G;
    valid = col < s.q_len * G;
    const int qi = valid ? col / G : 0;
    qr = a.q + ((i64)(s.q_start + qi) * (HK * G) + head * G + (valid ? col % G : 0)) * Q_ROW;
    clear();
    read = 0;
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
  DEV void begin_history(const Args& a, int head, u32 side) {   // side: SIDE bytes of shared memory
#if META_FORM == CHANNEL
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int e = 0; e < 2; e++) {
        const float2 v = *reinterpret_cast<const float2*>(qr + 16 * j + 8 * e + 2 * t);
        qh[j][e] = pack_half(v.x * norm, v.y * norm);
      }
#else
    float sq = 0.f;                                 // sum of q
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int e = 0; e < 2; e++) {
        const float sc = (float)(1 << (8 - plane_shift<K_BITS>(plane<K_BITS>(j, e))));
        const float2 v = *reinterpret_cast<const float2*>(qr + 16 * j + 8 * e + 2 * t);
        qb[j][e] = pack_half(v.x * norm * sc, v.y * norm * sc);
        const float2 r = unpack_half(qb[j][e]);
        sq += (r.x + r.y) * (1.f / sc);
      }
    sq += __shfl_xor_sync(~0u, sq, 1);
    sq += __shfl_xor_sync(~0u, sq, 2);
#if META_FORM == POSITION
    sq *= -0.5f * K_LEVELS / 65536.f;                 // where the products start, so that codes count from their middle
#else
    sq *= inv_norm * LO_UNIT;
#endif
    sum0 = __shfl_sync(~0u, sq, t * 8);
    sum1 = __shfl_sync(~0u, sq, t * 8 + 4);
#if META_FORM == POSITION
    bias = side;
    if (Q_SHARED)
      UNROLL for (int j = 0; j < NJ; j += 2)
        sts128(query_at(j), qb[j][0], qb[j][1], qb[j + 1][0], qb[j + 1][1]);
#endif
    // 2^8 of the query, 2^-24 of the codes
    decoder.begin(a.grid + head * 6, inv_norm * (65536.f * VALUE_UNIT), a.zero);
#endif
  }
#if META_FORM == CHANNEL
  u32 qh[NJ][2];                        // query in FP16, of which a page makes qb
  // The steps of the page whose channels of this head lie at `at` go into q; the products start from q . lo (sum0,
  // sum1), which is a product of the same shape with the same row for every token.
  DEV void enter_page(u32 at) {
    u32 top = 0;
    UNROLL for (int i = 0; i < D / 64; i++) {
      const uint2 some = lds64(at + i * 256 + (threadIdx.x & 31) * 8);
      top = max_u16x2(top, max_u16x2(some.x, some.y));
    }
    // A power of two above all steps, so that no operand leaves FP16's range.
    const int bits = __float_as_uint(unpack_half(__reduce_max_sync(~0u, top & 0xFFFF)).x) >> 23;
    const int e = max(bits - 126, -7);
    const float shrink = __uint_as_float((u32)(127 - e) << 23);
    float lo[2][4] = {};                            // two sums, so that half as many products wait for another
    UNROLL for (int j = 0; j < NJ; j++) {
      u32 l[2], step[2];
      UNROLL for (int h = 0; h < 2; h++) {
        const uint2 m = lds64(at + 64 * j + 32 * h + 8 * t);            // step, lo of two channels
        const float sc = shrink * (float)(1 << (8 - plane_shift<K_BITS>(plane<K_BITS>(j, h))));
        l[h] = __byte_perm(m.x, m.y, 0x7632);
        step[h] = __byte_perm(m.x, m.y, 0x5410);
        qb[j][h] = mul_half2(qh[j][h], mul_half2(step[h], pack_half(sc, sc)));
      }
      mma(lo[j & 1], l[0], step[0], l[1], step[1], qh[j][0], qh[j][1]); // rows 8 to 15, q . step, are not used
    }
    sum0 = (lo[0][0] + lo[1][0]) * (shrink * (1.f / 65536.f));
    sum1 = (lo[0][1] + lo[1][1]) * (shrink * (1.f / 65536.f));
    decoder.unit = inv_norm * 65536.f * __uint_as_float((u32)(127 + e) << 23);
  }
#endif
#if META_FORM == POSITION
  u32 bias, bias_at;                    // shared memory: [GROUP_TILES][2][COLS] floats of this warp; those of the next tile
  DEV u32 query_at(int j) const { return bias + BIAS_BYTES + (j * 16 + (threadIdx.x & 31)) * 16; }   // j even: qb[j], qb[j + 1]
  DEV bool group_ends() const { return bias_at == bias + BIAS_BYTES; }
  // b = q . w for both halves of GROUP_TILES tiles, `stride` tiles apart from `pos` on: 16 rows of `turns` times C(q),
  // in the unit of a.
  DEV void enter_group(const Args& a, int pos, int stride, int hist_end) {
    float b[2][4] = {};                             // two sums, so that half as many products wait for another
    const int last = (hist_end - 1) >> 4, turn = (pos >> 4) + 2 * stride * (g >> 1) + (g & 1);
    const u16* t0 = a.turns + min(turn, last) * D + 8 * t;
    const u16* t1 = a.turns + min(turn + 8 * stride, last) * D + 8 * t;
    const u16* c = reinterpret_cast<const u16*>(qr + D) + 8 * t;       // where there is no such column, another's
    UNROLL for (int r = 0; r < D / 32; r++) {
      const uint4 x = *reinterpret_cast<const uint4*>(t0 + 32 * r), y = *reinterpret_cast<const uint4*>(t1 + 32 * r);
      const uint4 z = *reinterpret_cast<const uint4*>(c + 32 * r);
      mma(b[0], x.x, y.x, x.y, y.y, z.x, z.y);
      mma(b[1], x.z, y.z, x.w, y.w, z.z, z.w);
    }
    const float unit = a.scale_log2 * LO_UNIT;
    u32 to[4];
    UNROLL for (int e = 0; e < 4; e++) to[e] = __float_as_uint((b[0][e] + b[1][e]) * unit);
    sts64(bias + g * 32 + t * 8, to[0], to[1]);
    sts64(bias + (g + 8) * 32 + t * 8, to[2], to[3]);
    bias_at = bias;
    __syncwarp();
  }
#endif
  // 0, known only when all of the last tile has been read. What hands its stage to the next copy adds this to an
  // address: without it the compiler waits for nothing between ldmatrix and the arrival, and copies wrote over codes
  // that were still to be read (README.md, Measured).
  DEV u32 stage_read(const Args& a) const { return read & a.zero; }
  DEV void end_history() {
    z0 = decoder.offset(z0, l0);
    z1 = decoder.offset(z1, l1);
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int e = 0; e < 4; e++)
        acc[j][e] *= VALUE_UNIT * (float)(1 << (24 - plane_shift<V_BITS>(plane<V_BITS>(j, e >> 1))));
  }
  // SUB: bytes between the two blocks. Tokens outside [from, to) are hidden when EDGE. After the
  // FIRST tile every column has seen a token, so the flags of that need no registers in the loop.
  template <int SUB, bool EDGE, bool FIRST>
  DEV void history_tile(const Args& a, u32 base, int from, int to) {
    const int lane = threadIdx.x & 31;
    float s[2][4], x[2][4];
    Token md[2][2];
    u32 k[2 * sets(K_BITS)][4], v[2 * sets(V_BITS)][4];           // [2 u + set], or both u in one
    if (halves(K_BITS) > 8) {
      const u32 at = base + (lane >> 4) * CHUNK + (lane & 15) * 16;
      UNROLL for (int i = 0; i < sets(K_BITS); i++)
        UNROLL for (int u = 0; u < 2; u++) ldsm(k[u * sets(K_BITS) + i], at + u * SUB + 2 * i * CHUNK);
    } else {
      ldsm(k[0], base + (lane >> 4) * SUB + (lane & 15) * 16);
    }
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int e = 0; e < 2; e++) md[u][e].load(base + META + u * SUB, g, 8 * e);
    UNROLL for (int u = 0; u < 2; u++) {
      s[u][0] = s[u][2] = META_FORM == CHANNEL ? sum0 : 0.f;
      s[u][1] = s[u][3] = META_FORM == CHANNEL ? sum1 : 0.f;
    }
    const float start[4] = {sum0, sum1, sum0, sum1};
#if Q_SHARED
    u32 qb[NJ][2];
    UNROLL for (int j = 0; j < NJ; j += 2) {
      const uint4 q = lds128(query_at(j));
      qb[j][0] = q.x, qb[j][1] = q.y, qb[j + 1][0] = q.z, qb[j + 1][1] = q.w;
    }
#endif
    UNROLL for (int j = 0; j < NJ; j++)
      UNROLL for (int u = 0; u < 2; u++) {
        const int p = plane<K_BITS>(j, 0), q = plane<K_BITS>(j, 1), w = u * sets(K_BITS) + j % sets(K_BITS);
        auto add = [&](u32 a0, u32 a1, u32 a2, u32 a3) {
          if (META_FORM == POSITION && j == 0) mma_from(s[u], start, a0, a1, a2, a3, qb[j][0], qb[j][1]);
          else mma(s[u], a0, a1, a2, a3, qb[j][0], qb[j][1]);
        };
        if (halves(K_BITS) > 8)
          add(operand<K_BITS>(k[w][0], p), operand<K_BITS>(k[w][1], p), operand<K_BITS>(k[w][2], p),
              operand<K_BITS>(k[w][3], p));
        else
          add(operand<K_BITS>(k[0][2 * u], p), operand<K_BITS>(k[0][2 * u + 1], p), operand<K_BITS>(k[0][2 * u], q),
              operand<K_BITS>(k[0][2 * u + 1], q));
      }
    float ks[2][2], kl[2][2];
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int e = 0; e < 2; e++) {
        const float2 m = decoder.key(md[u][e]);
        ks[u][e] = m.x;
        kl[u][e] = m.y;
      }
    // What a token's lo counts: the sum of q, of POSITION the product of q with the mean where its 16 tokens stand.
    float lo0[2] = {sum0, sum0}, lo1[2] = {sum1, sum1};
#if META_FORM == POSITION
    UNROLL for (int u = 0; u < 2; u++) {
      const uint2 b = lds64(bias_at + u * 32 + t * 8);
      lo0[u] = __uint_as_float(b.x), lo1[u] = __uint_as_float(b.y);
    }
    bias_at += 64;
#endif
    auto logits = [&]() {
      const float r0 = BIAS - m0, r1 = BIAS - m1;
      UNROLL for (int u = 0; u < 2; u++)
        UNROLL for (int e = 0; e < 2; e++) {
          if (SOFT_CAP) {
            x[u][2 * e] =
                capped(fmaf(s[u][2 * e], ks[u][e], K_LO ? kl[u][e] * lo0[u] : 0.f), a.cap_log2) + r0;
            x[u][2 * e + 1] =
                capped(fmaf(s[u][2 * e + 1], ks[u][e], K_LO ? kl[u][e] * lo1[u] : 0.f), a.cap_log2) + r1;
          } else {
            x[u][2 * e] = fmaf(s[u][2 * e], ks[u][e], K_LO ? fmaf(kl[u][e], lo0[u], r0) : r0);
            x[u][2 * e + 1] = fmaf(s[u][2 * e + 1], ks[u][e], K_LO ? fmaf(kl[u][e], lo1[u], r1) : r1);
          }
          if (EDGE) {
            const int i = 16 * u + g + 8 * e;
            if (i < from || i >= to) x[u][2 * e] = x[u][2 * e + 1] = HIDDEN, md[u][e].hide();
          }
        }
    };
    logits();
    if (outgrown(x, decoder.big(md) || (FIRST && (unset0 || unset1)))) {
      float excess[2][2];
      UNROLL for (int u = 0; u < 2; u++)
        UNROLL for (int e = 0; e < 2; e++)
          excess[u][e] = fmaxf(0.f, decoder.value_log2(md[u][e]) - BIG_STEP_LOG2);
      move_reference<2, FIRST>(x, excess);
      logits();
    }
    if (FIRST) unset0 = unset1 = false;
    if (halves(V_BITS) > 8) {
      const u32 at = base + (V_CODES / CHUNK + ((lane >> 3) & 1)) * CHUNK + ((lane & 7) + 8 * (lane >> 4)) * 16;
      UNROLL for (int i = 0; i < sets(V_BITS); i++)
        UNROLL for (int u = 0; u < 2; u++) ldsm_t(v[u * sets(V_BITS) + i], at + u * SUB + 2 * i * CHUNK);
    } else {
      ldsm_t(v[0], base + V_CODES + (lane >> 4) * SUB + (lane & 15) * 16);
    }
    read = v[0][0] ^ v[halves(V_BITS) > 8 ? 1 : 0][0];
    if (sets(V_BITS) > 1) read ^= v[2][0] ^ v[3][0];
    u32 pb[2][2];
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int e = 0; e < 2; e++) {
        const float p0 = ex2(x[u][2 * e]), p1 = ex2(x[u][2 * e + 1]);
        const float lo = decoder.value_lo(md[u][e]);
        l0 += p0;
        l1 += p1;
        if (V_LO) z0 = fmaf(p0, lo, z0), z1 = fmaf(p1, lo, z1);
        pb[u][e] = transpose8x8(decoder.weights(md[u][e], p0, p1));
      }
    UNROLL for (int u = 0; u < 2; u++)
      UNROLL for (int j = 0; j < NJ; j++) {
        const int p = plane<V_BITS>(j, 0), q = plane<V_BITS>(j, 1), w = u * sets(V_BITS) + j % sets(V_BITS);
        if (halves(V_BITS) > 8)
          mma(acc[j], operand<V_BITS>(v[w][0], p), operand<V_BITS>(v[w][1], p), operand<V_BITS>(v[w][2], p),
              operand<V_BITS>(v[w][3], p), pb[u][0], pb[u][1]);
        else
          mma(acc[j], operand<V_BITS>(v[0][2 * u], p), operand<V_BITS>(v[0][2 * u], q),
              operand<V_BITS>(v[0][2 * u + 1], p), operand<V_BITS>(v[0][2 * u + 1], q), pb[u][0], pb[u][1]);
      }
  }

};

// One tile at `base`, the channels that it brings at `channels`; the next tile of this warp comes STRIDE tiles later.
template <int SUB, bool FIRST, int STRIDE>
DEV void visit_tile(Warp& w, const Args& a, const Segment& s, u32 base, u32 channels, int tile) {
  const int pos = tile_base(a, tile), to = s.hist_end - pos;
#if META_FORM == CHANNEL
  if (begins_page(a, tile, FIRST)) w.enter_page(channels);
#elif META_FORM == POSITION
  if (FIRST || w.group_ends()) w.enter_group(a, pos, STRIDE, s.hist_end);
#endif
  if (FIRST) w.history_tile<SUB, true, true>(a, base, a.n_sink - pos, to);
  else if (to >= TILE) w.history_tile<SUB, false, false>(a, base, 0, TILE);
  else w.history_tile<SUB, true, false>(a, base, 0, to);
}
