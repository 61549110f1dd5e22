// Device primitives of the step kernel: barriers, bulk tensor copies, tensor cores, flags between SMs.
// emulator/platform.cuh has the same names for a CPU, so that the rest of these files runs there unchanged.
#pragma once

#if !defined(__CUDACC_RTC__)
#include <cstdint>
#else
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#endif

#define MEGA_FN __device__ __forceinline__
#define MEGA_KERNEL extern "C" __global__ void
#define MEGA_GRID_CONSTANT __grid_constant__
#define MEGA_BOUNDS __launch_bounds__(mega::kThreads, 1)

namespace mega {

using Barrier = uint64_t;
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

MEGA_FN int thread_id() { return threadIdx.x; }
MEGA_FN int block_id() { return blockIdx.x; }

MEGA_FN uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Dynamic shared memory, at a multiple of 1024: the copies' swizzle repeats at that distance.
MEGA_FN char* shared_memory() {
  extern __shared__ __align__(1024) char raw[];
  return raw;
}

// The value, of which the compiler then knows nothing: what follows from it is computed here, not before the layers' loop
// and kept in memory.
MEGA_FN int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// --- order

MEGA_FN void sync_block() { __syncthreads(); }
MEGA_FN void sync_warp() { __syncwarp(); }
MEGA_FN void sync_threads(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }

MEGA_FN void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

MEGA_FN uint32_t load_acquire(const uint32_t* p) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
MEGA_FN uint32_t add_acquire_release(uint32_t* p, uint32_t by) {
  uint32_t old;
  __threadfence();
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(by) : "memory");
  __threadfence();
  return old;
}
MEGA_FN void store_plain(uint32_t* p, uint32_t value) { *reinterpret_cast<volatile uint32_t*>(p) = value; }

// --- barriers in shared memory

MEGA_FN void barrier_init(Barrier* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
MEGA_FN void barrier_arrive(Barrier* bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
MEGA_FN void barrier_expect(Barrier* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
MEGA_FN bool barrier_passed(Barrier* bar, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(shared_address(bar)), "r"(parity)
      : "memory");
  return passed != 0;
}

// --- copies

// Values [slab * 64, ...) of weight rows [row, ...), as many as the map's box holds, to `to` as [slab][row][64] with
// 16-byte pieces swizzled by row. Pieces outside the matrix become zero and count as bytes that arrived. They are read
// once a step, so they leave the L2 cache first.
MEGA_FN void copy_weights(void* to, const TensorMap* map, int row, int slab, Barrier* bar) {
  constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(bar)), "r"(0), "r"(row), "r"(slab), "l"(kEvictFirst)
      : "memory");
}
MEGA_FN void copy_16_bytes(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
MEGA_FN void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
MEGA_FN void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// --- tensor cores and lanes

MEGA_FN void load_matrices(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
               : "r"(shared_address(row))
               : "memory");
}
MEGA_FN void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
// c += a (16 x 16) * b (16 x 8), bf16 products summed in fp32.
MEGA_FN void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
MEGA_FN float shuffle_from(float value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
MEGA_FN float shuffle_xor(float value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// Four words in shared memory at once.
MEGA_FN void load_vector(uint32_t (&to)[4], const uint32_t* from) {
  const uint4 four = *reinterpret_cast<const uint4*>(from);
  to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}
MEGA_FN void store_vector(uint32_t* to, const uint32_t (&from)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
}
// What this thread read of shared memory is there. Matrices are loaded late enough that an arrival at a barrier overtakes
// them: without this a copy was seen to overwrite a stage under its reader, once in some ten thousand stages.
MEGA_FN void finish_reads() { __threadfence_block(); }
// Whether it holds in all lanes.
MEGA_FN bool all_lanes(bool holds) { return __all_sync(0xffffffffu, holds); }

// --- numbers

// Two values rounded to nearest even, the first in the low half.
MEGA_FN uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// Two products of bf16 values, rounded; subnormal ones are kept.
MEGA_FN uint32_t multiply_bf16(uint32_t x, uint32_t y) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
  return product;
}
// Of the bytes of `x` those that the selector's digits name, the last digit's lowest; 8 more is the byte's sign, eight times.
MEGA_FN uint32_t pick_bytes(uint32_t x, uint32_t selector) {
  uint32_t picked;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(picked) : "r"(x), "r"(selector));
  return picked;
}
// Two values as e4m3, rounded to nearest even and within its range, the first in the low byte.
MEGA_FN uint16_t pack_fp8(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
MEGA_FN float from_bf16(uint16_t value) { return __uint_as_float(static_cast<uint32_t>(value) << 16); }
MEGA_FN float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MEGA_FN float minus_infinity() { return __int_as_float(0xff800000); }
MEGA_FN float inverse_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
MEGA_FN float divide(float x, float y) { return __fdividef(x, y); }

MEGA_FN uint32_t bits_of(float x) { return __float_as_uint(x); }
MEGA_FN float float_of(uint32_t bits) { return __uint_as_float(bits); }

// Memory that no step writes, asked for here and not where the value is first used.
MEGA_FN float load_constant(const float* from) {
  float value;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(from));
  return value;
}

// --- memory that SMs share: past the L1 cache, each word whole, in no order

MEGA_FN void load_words(uint32_t (&to)[4], const uint32_t* from) {
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from)
               : "memory");
}
MEGA_FN void store_word(uint32_t* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
MEGA_FN uint64_t load_long(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}
MEGA_FN void load_longs(uint64_t (&to)[2], const uint64_t* from) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(to[0]), "=l"(to[1]) : "l"(from) : "memory");
}
MEGA_FN void store_long(uint64_t* to, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// --- time and failure

MEGA_FN uint64_t now_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
// The SM's clock.
MEGA_FN uint64_t now_clocks() { return static_cast<uint64_t>(clock64()); }
MEGA_FN void pause() {}
// What failed, where and what was seen, whole; of several failures one.
MEGA_FN void record_failure(uint32_t* to, uint32_t where, uint32_t sm, uint32_t seen) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(1), "r"(where), "r"(sm), "r"(seen)
               : "memory");
}
MEGA_FN void stop() {
  __threadfence_system();
  __trap();
}

}  // namespace mega
