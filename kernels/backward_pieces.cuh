// What the backward's consumers are made of: products, masks, the way of dS through shared memory,
// the staging of dQ, and where gradients go.
#pragma once
#include "backward_producers.cuh"

namespace distflash {

__device__ inline void add_four(float* at, float2 x, float2 y) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x),
                 "f"(x.y), "f"(y.x), "f"(y.y)
                 : "memory");
}

// Adds scale * x, a 64-row accumulator, to rows `row` and row + 8 (while below `end`) of an fp32
// matrix, columns `column` on. Two lanes swap halves of two groups of 8 columns, so that each adds
// 16 bytes: half the requests.
template <int kColumns, int kCount>
__device__ inline void add_rows(const float (&x)[kCount], float* matrix, int64_t seq_stride,
                                int row, int end, int column, float scale) {
    const int lane = threadIdx.x % 4;
    const bool odd = lane % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float* const at = matrix + int64_t(row + 8 * r) * seq_stride + column + lane / 2 * 4;
#pragma unroll
        for (int i = 0; i < kCount / 4; i += 2) {
            const float2 low = make_float2(x[4 * i + 2 * r] * scale, x[4 * i + 2 * r + 1] * scale);
            const float2 high =
                make_float2(x[4 * i + 4 + 2 * r] * scale, x[4 * i + 5 + 2 * r] * scale);
            const float2 give = odd ? low : high, keep = odd ? high : low;
            const float2 got = make_float2(__shfl_xor_sync(0xffffffffu, give.x, 1),
                                           __shfl_xor_sync(0xffffffffu, give.y, 1));
            if (row + 8 * r < end && column + 8 * i < kColumns)
                add_four(at + 8 * i + odd * 8, odd ? got : keep, odd ? keep : got);
        }
    }
}

// Where a thread stages its first number of dQ: queries as rows, in slabs of 32 fp32 columns with
// the 128-byte swizzle.
template <int kQueries>
__device__ inline uint32_t staging_address(const char* staging) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int query = lane % 4 * 2, column = warp % 2 * 16 + lane / 4;
    return shared_address(staging) + warp / 2 * kQueries * 128 + query * 128 +
           ((column / 4) ^ query) * 16 + column % 4 * 4;
}

// Stages scale * x, an accumulator of 64 columns of dQ by queries. Free of bank conflicts: the
// lanes of a store hold 8 columns of 4 queries whose numbers differ in the swizzled bits.
template <int kCount>
__device__ inline void stage_transposed(uint32_t staging, const float (&x)[kCount], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const uint32_t at = (staging ^ (e * 16 + r * 32)) + e * 128;
#pragma unroll
            for (int i = 0; i < kCount / 4; ++i)
                store_shared(at + i * 8 * 128, x[4 * i + 2 * r + e] * scale);
        }
}

// d [64 keys x queries] = A [64 keys x kHeadDim] B^T, both K-major in shared memory.
template <typename S, int kCount>
__device__ inline void issue_transposed(float (&d)[kCount], uint64_t keys, uint64_t queries) {
    issue_k_major<typename S::T, S::kHeadDim, S::kKeySlabBytes, S::kQuerySlabBytes>(d, keys,
                                                                                    queries);
}

// d [64 keys x kHeadDim] += A [64 keys x queries, registers] B [queries x kHeadDim].
template <typename S>
__device__ inline void issue_key_gradient(float (&d)[S::kHeadDim / 2],
                                          uint32_t (&a)[S::kRows / 16][4], uint64_t b) {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kRows / 16; ++step)
        wgmma_rs<typename S::T, 1>(d, a[step], operand_at(b, step * 16 * kSlab * 2), 1);
    wgmma_commit();
}

// The same with A [64 keys x queries] in shared memory: dS (or P) as stored.
template <typename S, int kCount>
__device__ inline void issue_key_gradient(float (&d)[kCount], uint64_t ds, uint64_t b) {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kRows / 16; ++step)
        wgmma_ss<typename S::T, 0, 1>(
            d, operand_at(ds, step * 32), operand_at(b, step * 16 * kSlab * 2), 1);
    wgmma_commit();
}

// d [64 queries x kPiece] = dS [64 queries x keys] K [keys x kPiece], dS stored keys by queries;
// wide heads.
template <typename S>
__device__ inline void issue_query_gradient(float (&d)[S::kPiece / 2], uint64_t ds, uint64_t k) {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
        wgmma_ss<typename S::T, 1, 1>(d, operand_at(ds, step * 16 * kSlab * 2),
                                      operand_at(k, step * 16 * kSlab * 2), step > 0);
    wgmma_commit();
}

// d [64 columns x queries] = K^T [64 columns x keys] dS^T [keys x queries].
template <typename S>
__device__ inline void issue_query_gradient_transposed(float (&d)[S::kPieceRows / 2], uint64_t k,
                                                       uint64_t ds) {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kKeys / 16; ++step)
        wgmma_ss<typename S::T, 1, 1>(d, operand_at(k, step * 16 * kSlab * 2),
                                      operand_at(ds, step * 16 * kSlab * 2), step > 0);
    wgmma_commit();
}

// Key `key` (and key + 8) of this thread sees the queries i with key - right <= i <= key - left.
template <int kCount>
__device__ inline void apply_mask_transposed(float (&s)[kCount], const Band& band, int key,
                                             int query) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int k = key + 8 * r;
        const int first = k - band.right - query;
        const int last = k < band.k_len ? k - band.left - query : -1;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * i + e < first || 8 * i + e > last) s[4 * i + 2 * r + e] = -INFINITY;
    }
}

// Whether any sign bit is set.
template <int kCount>
__device__ inline bool any_negative(const float (&x)[kCount]) {
    uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) signs |= __float_as_uint(x[i]);
    return int(signs) < 0;
}

template <typename T, int kSteps, int kCount>
__device__ inline void pack_steps(uint32_t (&p)[kSteps][4], const float (&s)[kCount]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            p[step][i] = pack<T>(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
}

// Stores 16 keys of a warp, keys by queries, in the swizzled slab layout, from column 8 * chunk
// on. `row` is the key that this lane addresses: lanes 0-15 the 16 keys' first 8 columns of each
// step, lanes 16-31 the second 8.
template <int kSteps>
__device__ inline void store_transposed(char* slab, const uint32_t (&x)[kSteps][4], int row,
                                        int chunk) {
    chunk += threadIdx.x % 32 / 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        char* at = slab + row * 128 + ((chunk + 2 * step) ^ (row % 8)) * 16;
        store_matrices(shared_address(at), x[step]);
    }
}

// Where a lane addresses the first of its rows' chunks in a tile of dS; see store_transposed.
__device__ inline uint32_t score_gradient_address(const char* tile, int row) {
    return shared_address(tile) + row * kSlab * 2 + (threadIdx.x % 32 / 16 ^ row % 8) * 16;
}

template <typename S>
__device__ inline void store_score_gradient(uint32_t at, const uint32_t (&x)[S::kRows / 16][4]) {
    constexpr int kSlabSteps = kSlab / 16;
#pragma unroll
    for (int step = 0; step < S::kRows / 16; ++step)
        store_matrices((at ^ (step % kSlabSteps * 32)) + step / kSlabSteps * S::kKeySlabBytes,
                       x[step]);
}

// LSEs and deltas of a tile's rows, from shared memory: four numbers of a lane for every 16 queries
// (see row_place), first all LSEs, then all deltas. A load waits long behind the operand reads of
// running products, so each is issued kAhead groups before its use.
template <int kSteps, int kAhead>
struct RowFeed {
    float slot[kAhead][4];
    uint32_t lse, delta;

    __device__ RowFeed(uint32_t lse_at, uint32_t delta_at) : lse(lse_at), delta(delta_at) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load(i);
    }
    __device__ void load(int i) {
        if (i < 2 * kSteps)
            load_shared(slot[i % kAhead], i < kSteps ? lse + 64 * i : delta + 64 * (i - kSteps));
    }

    // s <- exp2(scale s - lse)
    __device__ void exponentiate(float (&s)[8 * kSteps], float scale_log2) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                s[8 * i + j] =
                    exp2_fast(s[8 * i + j] * scale_log2 - slot[i % kAhead][j / 4 * 2 + j % 2]);
            load(i + kAhead);
        }
    }

    // dp <- p (dp - delta), the gradient of the scores.
    __device__ void score_gradient(float (&dp)[8 * kSteps], const float (&p)[8 * kSteps]) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int group = kSteps + i;
#pragma unroll
            for (int j = 0; j < 8; ++j)
                dp[8 * i + j] = p[8 * i + j] *
                                (dp[8 * i + j] - slot[group % kAhead][j / 4 * 2 + j % 2]);
            load(group + kAhead);
        }
    }
};

// Where the gradients of a unit of work go, and in which order.
struct GradientSink {
    const KeyTile& at;
    const BackwardTaskParams& task;
    int kv_head, warpgroup;
    float *dq, *dk, *dv;

    __device__ GradientSink(const KeyTile& at_, int warpgroup_)
        : at(at_), task(*at_.task), warpgroup(warpgroup_) {
        kv_head = at.head / task.heads_per_kv;
        dq = task.dq + at.batch * task.dq_stride.batch + at.head * task.dq_stride.head;
        dk = task.dk + at.batch * task.dk_stride.batch + kv_head * task.dk_stride.head;
        dv = task.dv + at.batch * task.dv_stride.batch + kv_head * task.dv_stride.head;
    }

    // Straight from registers.
    template <typename S>
    __device__ void add_dq(const float (&piece)[S::kPiece / 2], int m, int row_in_tile,
                           float scale) const {
        int turn = 0;
        int* order = nullptr;
        if (task.dq_order != nullptr) {
            order = dq_order<S>(at, m, warpgroup, turn);
            if (threadIdx.x % 128 == 0) await_turn(order, turn);
            named_sync(2 + warpgroup, 128);
        }
        add_rows<S::kColumns>(piece, dq, task.dq_stride.seq, m * S::kRows + row_in_tile,
                              task.q_len, warpgroup * S::kPiece, scale);
        if (order != nullptr) {
            __threadfence();
            named_sync(2 + warpgroup, 128);
            if (threadIdx.x % 128 == 0) pass_turn(order);
        }
    }

    // Query heads add to the keys of their KV head in ascending order.
    template <typename S, int kCount>
    __device__ void add_dkv(const float (&dk_tile)[kCount], const float (&dv_tile)[kCount],
                            int key, int column, float scale) const {
        int* order = nullptr;
        if (task.dkv_order != nullptr) {
            const int kv_heads = task.q_heads / task.heads_per_kv;
            order = task.dkv_order +
                    ((int64_t(at.batch) * kv_heads + kv_head) * task.num_k_tiles + at.tile) *
                        kOrderCounters +
                    warpgroup;
            if (threadIdx.x % 128 == 0) await_turn(order, at.head % task.heads_per_kv);
            named_sync(2 + warpgroup, 128);
        }
        add_rows<S::kColumns>(dv_tile, dv, task.dv_stride.seq, key, task.band.k_len, column, 1.f);
        add_rows<S::kColumns>(dk_tile, dk, task.dk_stride.seq, key, task.band.k_len, column,
                              scale);
        if (order != nullptr) {
            __threadfence();
            named_sync(2 + warpgroup, 128);
            if (threadIdx.x % 128 == 0) pass_turn(order);
        }
    }
};

}  // namespace distflash
