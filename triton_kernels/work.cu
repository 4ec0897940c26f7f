// The work of a split: what it does for which request. After common.cu and meta.cu; needs COLS (columns of a warp) and
// Q_SHARED (cuda_attend.Form).

struct Args {
  float* o;              // [splits + B, HK, columns, D]
  float2* ml;            // [splits + B, HK, columns]
  const int* plan;
  const float* q;        // [T, HK * G, Q_ROW]
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
  const float* grid;     // [HK, 2, 3], COMPACT
  const u16* channels;   // [slots / PAGE, HK, D, 2] step and lo, CHANNEL
  int zero;              // 0, which the compiler does not know
  const u16* turns;      // [contexts / 16, D] FP16 cosines and sines, POSITION
};
constexpr int GROUP_TILES = 8;            // whose position biases are computed together
// Shared memory that a warp keeps beside its tiles for POSITION: those biases and, in attend_cta, whose registers are
// few, the query operands.
constexpr int BIAS_BYTES = GROUP_TILES * 2 * COLS * 4;
constexpr int SIDE = META_FORM == POSITION ? BIAS_BYTES + Q_SHARED * NJ * 256 : 0;

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

// Tiles of CHANNEL begin at multiples of 32, so that none lies in two pages; they are as many as the plan's, because
// history ends at the end of a page.
DEV int tile_base(const Args& a, int tile) {
  return (a.n_sink & (META_FORM == CHANNEL ? ~31 : ~15)) + tile * TILE;
}
// Whether a tile brings the channels of its page: the first of a segment and the first of a page do.
DEV bool begins_page(const Args& a, int tile, bool first) {
  return META_FORM == CHANNEL && (first || tile_base(a, tile) % PAGE == 0);
}
DEV i64 partial_at(const Args& a, int split, int b, int head, int col) {
  return ((i64)(split + b) * HK + head) * a.columns + col;
}
