// What the CUDA kernels share: types, the block layout, instructions. Put before each of them by
// driver.py; compiled at run time for one shape, without headers, so without a toolkit, with these
// macros (cuda_args.Shape):
// HEAD_DIM (64, 128), KV_HEADS, GROUP (query heads per KV head), WINDOW_BF16 (the model's dtype is
// bf16, else fp16); META_FORM (what a token's metadata are), one of AFFINE, COMPACT, SCALE, CHANNEL,
// POSITION; K_BITS, V_BITS (of a code; 2, or 4 of POSITION).
// Bytes (layout.py): HB of one head of one block of 16 slots; V_CODES, META: where V's codes and the
// metadata begin in it; META_BYTES of a token's metadata; CHUNK of a chunk of 16 tokens' codes;
// CHANNELS of the channels that PAGE slots share, one head.
// Tokens (plan.py): TILE of a history tile, WIN of a window chunk, WIN_COST its cost; numbers of a
// plan: HEADER, FIELDS of a request, SPLIT of a split.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;
typedef long long i64;

#ifndef EMULATOR                         // tests/kernels/emulator, which brings its own
#define DEV __device__ __forceinline__
#define DYNAMIC_SHARED(type, name, alignment) extern __shared__ __align__(alignment) type name[]
#endif
#define UNROLL _Pragma("unroll")

constexpr int D = HEAD_DIM, HK = KV_HEADS, G = GROUP;
constexpr int NJ = D / 16;              // 16-channel tiles of a row
constexpr int Q_ROW = META_FORM == POSITION ? D * 3 / 2 : D;   // floats of a query row: D rotated channels (, C(q): D in FP16)
constexpr int K_LEVELS = (1 << K_BITS) - 1, V_LEVELS = (1 << V_BITS) - 1;   // the largest codes
constexpr float BIAS = 4.f;             // p = 2^(logit - m + BIAS) keeps small p normal in FP16
constexpr float THRESHOLD = 8.f;
constexpr float HIDDEN = -1e30f;
constexpr float LOG2E = 1.4426950408889634f;

DEV int div_up(int a, int b) { return (a + b - 1) / b; }

#ifndef EMULATOR
// ---------------------------------------------------------------- instructions
DEV u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void ldsm(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEV void ldsm_t(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
DEV uint2 lds64(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
DEV u32 lds32(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
DEV uint4 lds128(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEV void sts64(u32 a, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
DEV void sts128(u32 a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEV u32 transpose8x8(u32 a) {
  u32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_from(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
DEV void mma_window(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if WINDOW_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
  mma(c, a0, a1, a2, a3, b0, b1);
#endif
}
DEV float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float lg2(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV u32 pack_half(float lo, float hi) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
DEV float2 unpack_half(u32 v) {
  float2 f;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
      : "=f"(f.x), "=f"(f.y) : "r"(v));
  return f;
}
DEV u32 mul_half2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
DEV u32 fma_half2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
DEV u32 pack_window(float lo, float hi) {
#if WINDOW_BF16
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
#else
  return pack_half(lo, hi);
#endif
}
DEV float2 unpack_window(u32 v) {
#if WINDOW_BF16
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u));
#else
  return unpack_half(v);
#endif
}
// x and y in two operands whose sum keeps twice the mantissa of the windows' type
DEV void split_window(float x, float y, u32& hi, u32& lo) {
  hi = pack_window(x, y);
  const float2 r = unpack_window(hi);
  lo = pack_window(x - r.x, y - r.y);
}
DEV u32 max_u16x2(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
#else
  return __vmaxu2(a, b);
#endif
}
DEV void wait_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void release_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#if __CUDA_ARCH__ >= 900
DEV void bar_init(u32 b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DEV void bar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void bar_expect(u32 b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void bar_arrive(u32 b) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory");
}
DEV void bar_wait(u32 b, u32 parity) {
  asm volatile("{\n.reg .pred p;\nW%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
               "@!p bra W%=;\n}" ::"r"(b), "r"(parity) : "memory");
}
DEV void bulk_copy(u32 d, const void* s, int bytes, u32 b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(d), "l"(s), "r"(bytes), "r"(b) : "memory");
}
#endif
DEV void copy16(u32 d, const void* s) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(d), "l"(s) : "memory");
}
template <int BYTES> DEV void copy_few(u32 d, const void* s) {   // 4 or 8
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(d), "l"(s), "n"(BYTES) : "memory");
}
DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> DEV void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
DEV void wait_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
DEV void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#endif  // EMULATOR
