// The thin layer over Hopper's instructions: mbarriers, bulk tensor copies (TMA), warpgroup
// matrix products (wgmma), named barriers, register reallocation. One function an instruction;
// nothing here knows attention.
//
// Shared-memory operand layout, the same for every tile: columns in slabs of 64 16-bit numbers
// (128 bytes, TMA's and wgmma's 128-byte swizzle), inside a slab one row after another, slabs one
// after another. Tiles start at multiples of 1024 bytes.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace distflash {

using bf16 = __nv_bfloat16;
using fp16 = __half;

constexpr int kSlab = 64;  // columns of a swizzled slab

__device__ inline uint32_t shared_address(const void* p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

// ---------------------------------------------------------------- mbarriers

__device__ inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
}

__device__ inline void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

// Arrives and announces `bytes` that bulk copies will deliver.
__device__ inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits until the phase with this parity has completed.
__device__ inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Whether the phase with this parity has completed, without waiting for it. Asked ahead of time it
// hides the latency of the question.
__device__ inline bool barrier_test(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done != 0;
}

// Waits unless a test has already found the phase completed.
__device__ inline void finish_wait(bool done, uint64_t* barrier, uint32_t parity) {
    if (!done) barrier_wait(barrier, parity);
}

// Makes barrier initialisation visible to the copy engine.
__device__ inline void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders ordinary shared-memory writes before the copy engine's and tensor cores' reads.
__device__ inline void fence_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------- named barriers, registers

__device__ inline void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ inline void registers_release() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void registers_acquire() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// x, which is the same in all lanes of a warp, in a form that the compiler knows to be so: it then
// keeps what depends on it in uniform registers, where wgmma takes its operand addresses.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ inline bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(elected));
    return elected != 0;
}

// ---------------------------------------------------------------- shared memory

// x, in a form that keeps the compiler from computing what depends on it ahead of time: inside a
// loop that saves the registers of everything that could have been computed before.
template <typename T>
__device__ inline T opaque(T x) {
    static_assert(sizeof(T) == 4);
    asm volatile("" : "+r"(x));
    return x;
}

__device__ inline void load_shared(float (&x)[4], uint32_t at) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(at)
                 : "memory");
}

__device__ inline void store_shared(uint32_t at, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

// Four 8 x 8 matrices of 16 bit in the accumulator layout; lane l addresses row l % 8 of matrix
// l / 8.
__device__ inline void store_matrices(uint32_t at, const uint32_t (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// ---------------------------------------------------------------- bulk copies

__device__ inline void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Box at (column, row, head, batch) of a (d, seq, head, batch) map into shared memory.
// Out-of-range rows and columns arrive as zeros and count towards the barrier's bytes.
__device__ inline void tensor_load(void* shared, const CUtensorMap* map, uint64_t* barrier,
                                   int column, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(shared)),
        "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Adds a box in shared memory to a (d, seq, head, batch) map of fp32; what lies out of range stays
// away. Belongs to the thread's current bulk group.
__device__ inline void tensor_add(const CUtensorMap* map, const void* shared, int column, int row,
                                  int head, int batch) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
        " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
        "r"(shared_address(shared)), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the thread's bulk groups have read their shared memory.
__device__ inline void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until the thread's bulk groups are done and their writes visible to it.
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Brings memory into the L2 cache: the line of an address, or so many bytes (both in sixteens).
__device__ inline void prefetch_l2(const void* global) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

__device__ inline void prefetch_l2(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
}

// ---------------------------------------------------------------- wgmma

// A and B operands in shared memory are described by address, two byte strides and the swizzle.
// K-major (reduction dimension contiguous): groups of 8 rows are 1024 bytes apart.
// MN-major (reduction dimension is the row): 8 rows of the reduction are 1024 bytes apart and
// the next 64 columns lie `slab_bytes` further.
constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
constexpr uint64_t kRowGroupStride = uint64_t(1024 >> 4) << 32;

__device__ inline uint64_t operand_k_major(const void* tile) {
    return kSwizzle128 | kRowGroupStride | (uint64_t(1) << 16) |
           ((shared_address(tile) & 0x3ffff) >> 4);
}

__device__ inline uint64_t operand_mn_major(const void* tile, int slab_bytes) {
    return kSwizzle128 | kRowGroupStride | (uint64_t(slab_bytes >> 4) << 16) |
           ((shared_address(tile) & 0x3ffff) >> 4);
}

// The operand `bytes` further on.
__device__ inline uint64_t operand_at(uint64_t operand, int bytes) {
    return operand + uint64_t(bytes >> 4);
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed groups are still running.
template <int kPending>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving reads or writes of an accumulator across this point.
template <typename T, int kCount>
__device__ inline void pin(T (&registers)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if constexpr (std::is_same_v<T, float>)
            asm volatile("" : "+f"(registers[i])::"memory");
        else
            asm volatile("" : "+r"(registers[i])::"memory");
    }
}

// The same for an operand in registers.
template <int kSteps>
__device__ inline void pin(uint32_t (&operand)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) pin(operand[step]);
}

// The assembler hoists a wgmma wait above arithmetic that does not depend on it, which would leave
// that arithmetic outside the shadow of the running product. A branch it can't decide holds the
// order: `never` is false by construction and computed from what must come first. (The vote keeps
// the control flow uniform, without which operands move to ordinary registers.)
__device__ inline void keep_before(bool never) {
    if (__any_sync(0xffffffffu, never)) asm volatile("trap;");
}

// Operand lists of the wgmma statements below: registers %0..%n-1 and their constraints.
#define DF_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define DF_R32 DF_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define DF_R40 DF_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define DF_R48 DF_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define DF_R56 DF_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define DF_R64 DF_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define DF_R72 DF_R64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define DF_R80 DF_R72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define DF_R88 DF_R80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define DF_R96 DF_R88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define DF_R128                                                                              \
    DF_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"   \
           "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define DF_C8(i)                                                                             \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]),              \
        "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DF_C16 DF_C8(0), DF_C8(8)
#define DF_C32 DF_C16, DF_C8(16), DF_C8(24)
#define DF_C40 DF_C32, DF_C8(32)
#define DF_C48 DF_C40, DF_C8(40)
#define DF_C56 DF_C48, DF_C8(48)
#define DF_C64 DF_C56, DF_C8(56)
#define DF_C72 DF_C64, DF_C8(64)
#define DF_C80 DF_C72, DF_C8(72)
#define DF_C88 DF_C80, DF_C8(80)
#define DF_C96 DF_C88, DF_C8(88)
#define DF_C128 DF_C96, DF_C8(96), DF_C8(104), DF_C8(112), DF_C8(120)

// n: columns; r: registers a thread (n / 2); i0.. : the operand numbers after them.
#define DF_WGMMA_SS(n, r, type, i0, i1, i2, i3, i4)                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                           \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type             \
                 " {" DF_R##r "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}\n"      \
                 : DF_C##r                                                                   \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB))

#define DF_WGMMA_RS(n, r, type, i0, i1, i2, i3, i4, i5, i6)                                  \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                           \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type             \
                 " {" DF_R##r "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4           \
                 ", p, 1, 1, %" #i6 ";\n}\n"                                                 \
                 : DF_C##r                                                                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),      \
                   "n"(kTransB))

#define DF_SHAPES_SS(type)                                                                   \
    if constexpr (kN == 32) DF_WGMMA_SS(32, 16, type, 16, 17, 18, 19, 20);                   \
    if constexpr (kN == 64) DF_WGMMA_SS(64, 32, type, 32, 33, 34, 35, 36);                   \
    if constexpr (kN == 80) DF_WGMMA_SS(80, 40, type, 40, 41, 42, 43, 44);                   \
    if constexpr (kN == 96) DF_WGMMA_SS(96, 48, type, 48, 49, 50, 51, 52);                   \
    if constexpr (kN == 112) DF_WGMMA_SS(112, 56, type, 56, 57, 58, 59, 60);                 \
    if constexpr (kN == 128) DF_WGMMA_SS(128, 64, type, 64, 65, 66, 67, 68);                 \
    if constexpr (kN == 144) DF_WGMMA_SS(144, 72, type, 72, 73, 74, 75, 76);                 \
    if constexpr (kN == 160) DF_WGMMA_SS(160, 80, type, 80, 81, 82, 83, 84);                 \
    if constexpr (kN == 176) DF_WGMMA_SS(176, 88, type, 88, 89, 90, 91, 92);                 \
    if constexpr (kN == 192) DF_WGMMA_SS(192, 96, type, 96, 97, 98, 99, 100);

#define DF_SHAPES_RS(type)                                                                   \
    if constexpr (kN == 32) DF_WGMMA_RS(32, 16, type, 16, 17, 18, 19, 20, 21, 22);           \
    if constexpr (kN == 64) DF_WGMMA_RS(64, 32, type, 32, 33, 34, 35, 36, 37, 38);           \
    if constexpr (kN == 128) DF_WGMMA_RS(128, 64, type, 64, 65, 66, 67, 68, 69, 70);         \
    if constexpr (kN == 192) DF_WGMMA_RS(192, 96, type, 96, 97, 98, 99, 100, 101, 102);      \
    if constexpr (kN == 256) DF_WGMMA_RS(256, 128, type, 128, 129, 130, 131, 132, 133, 134);

// d [64 x kN] (+)= A [64 x 16] B [16 x kN], both in shared memory. kTrans: 0 = K-major.
// Thread t of the warpgroup holds row 16*(t/32) + (t%32)/4 (+8) and of every 8 columns the two
// at 2*(t%4): d[4g], d[4g+1] of the row and d[4g+2], d[4g+3] of the row + 8, columns 8g...
template <typename T, int kTransA, int kTransB, int kCount>
__device__ inline void wgmma_ss(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
    constexpr int kN = kCount * 2;
    static_assert(kN % 16 == 0 && kN <= 192);
    if constexpr (std::is_same_v<T, bf16>) {
        DF_SHAPES_SS("bf16")
    } else {
        DF_SHAPES_SS("f16")
    }
}

// The same with A in registers (the layout of an accumulator cast to 16 bit, two columns each).
template <typename T, int kTransB, int kCount>
__device__ inline void wgmma_rs(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b,
                                int accumulate) {
    constexpr int kN = kCount * 2;
    if constexpr (std::is_same_v<T, bf16>) {
        DF_SHAPES_RS("bf16")
    } else {
        DF_SHAPES_RS("f16")
    }
}

// ---------------------------------------------------------------- arithmetic

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger one; not a number if one of them is none.
__device__ inline float max_nan(float x, float y) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
}

// (low, high) rounded to 16 bit in one register, low in the low half.
template <typename T>
__device__ inline uint32_t pack(float low, float high) {
    uint32_t packed;
    if constexpr (std::is_same_v<T, bf16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// d = A B^T over kDepth columns, both K-major in shared memory in slabs of 64 columns, which are so
// many bytes apart.
template <typename T, int kDepth, int kSlabBytesA, int kSlabBytesB, int kCount>
__device__ inline void issue_k_major(float (&d)[kCount], uint64_t a, uint64_t b) {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
        const int slab = step / 4, column_bytes = step % 4 * 32;
        wgmma_ss<T, 0, 0>(d, operand_at(a, slab * kSlabBytesA + column_bytes),
                          operand_at(b, slab * kSlabBytesB + column_bytes), step > 0);
    }
    wgmma_commit();
}

}  // namespace distflash
