// Rows of K, V and q: rotation, and the windows they go to. After common.cu; needs ROWS of a tile of an MMA.
//
// Rotation: x is exact in 16 bits and R is the sum of three 16-bit matrices, so three MMAs give
// float32 accuracy (two for queries, which are not quantised); a warp keeps the fragments of 8
// columns of R in registers.

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
template <int N> DEV void load_shared(float (&f)[N], const float* p) {
  if (N == 4) {
    const float4 x = *reinterpret_cast<const float4*>(p);
    f[0] = x.x, f[1] = x.y, f[N - 2] = x.z, f[N - 1] = x.w;
  } else {
    const float2 x = *reinterpret_cast<const float2*>(p);
    f[0] = x.x, f[1] = x.y;
  }
}
DEV float dot(const Row& x, const Row& y) {
  float sum = 0.f;
  UNROLL for (int k = 0; k < VEC; k++) sum = fmaf(x.v[k], y.v[k], sum);
  return warp_sum(sum);
}
DEV void write_model_row(u16* dst, const Row& y) {
  const int lane = threadIdx.x & 31;
  u32 w[VEC / 2];
  UNROLL for (int k = 0; k < VEC / 2; k++) w[k] = pack_window(y.v[2 * k], y.v[2 * k + 1]);
  if (VEC == 4) *reinterpret_cast<uint2*>(dst + lane * VEC) = make_uint2(w[0], w[VEC / 2 - 1]);
  else *reinterpret_cast<u32*>(dst + lane * VEC) = w[0];
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
