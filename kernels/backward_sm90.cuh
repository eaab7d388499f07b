// Backward attention into fp32 accumulators, Hopper.
//
// A unit of work is one tile of 128 keys of one query head: K and V stay in shared memory, dK and
// dV in the registers of two consumer warpgroups (64 keys each), and the loop runs over the query
// tiles that see the keys. Everything is computed transposed, keys as rows, so that P and dS feed
// the dV and dK products from registers; only dS goes through shared memory, for dQ.
//
// The tensor cores always have work queued behind the arithmetic of a warpgroup:
//   dP(i) runs beside P(i) = exp(S(i)), dV(i) beside dS(i), and dK(i) with S(i+1) beside the
//   staging of dQ(i-1).
//
// dQ comes one tile late, so that no warpgroup waits for the other's dS of the same tile and the
// two may drift apart: one's exponentials then run beside the other's products.
//
// Above head dimension 128 the accumulators do not fit beside this: there a tile has 64 keys, the
// warpgroups share it, each computing half of the queries' scores and half of the columns of every
// gradient, and nothing is overlapped inside a warpgroup.
//
// dQ leaves through shared memory and the copy engine's add, sent by a warp of its own (from
// registers it cost a quarter of the time: 32-byte requests, and wgmma waiting for registers that
// additions still held). dK and dV, once a unit, leave by vector reductions straight from
// registers. If order counters are given, they make the additions to one tile happen in a fixed
// order.
#pragma once
#include "tasks_sm90.cuh"

namespace distflash {

constexpr int kOrderCounters = 2;  // of a tile: one for each warpgroup

// One task. Order counters (deterministic mode; zero at the launch) or null: dq_order [batch,
// heads][query tiles][kOrderCounters], dkv_order [batch, KV heads][key tiles][kOrderCounters].
struct alignas(128) BackwardTaskParams {
    CUtensorMap q, k, v, dout, dq_add;
    const float* lse;
    const float* delta;
    float* dq;
    float* dk;
    float* dv;
    int* dq_order;
    int* dkv_order;
    Strides3 lse_stride, delta_stride, dq_stride, dk_stride, dv_stride;
    Band band;
    int q_heads, heads_per_kv, batch_heads;
    int q_len, num_q_tiles, num_k_tiles;
    int descending;  // take the last key tiles first (deterministic mode)
    int section_heads;  // query heads whose Q, dO and dQ should share the L2 cache
    int num_tiles;      // batch_heads * num_k_tiles
};

struct BackwardParams {
    BackwardTaskParams task[kMaxSegments];
    int num_tiles;
    float scale, scale_log2;
    int* tile_counter;  // zero before and after the launch
};

// One unit of work: a key tile of a query head, and the query tiles that see it.
struct KeyTile {
    const BackwardTaskParams* task;
    int tile, head, batch;
    int first_query_tile, last_query_tile;  // [first, last)
};

// Inside a section of heads the first keys come first: with a causal mask they take longest. In
// deterministic mode the last ones do: under a causal mask they reach a query tile earliest, so
// that adding in this order hardly waits, and a unit waits only for units with smaller numbers.
template <int kRows, int kKeys>
__device__ inline KeyTile locate_key_tile(const BackwardParams& params, int idx) {
    const BackwardTaskParams* task = params.task;
    while (idx >= task->num_tiles) {
        idx -= task->num_tiles;
        ++task;
    }
    const int section_tiles = task->section_heads * task->num_k_tiles;
    const int section = idx / section_tiles;
    idx -= section * section_tiles;
    const int first_head = section * task->section_heads;
    const int heads = min(task->section_heads, task->batch_heads - first_head);
    const int batch_head = first_head + idx % heads;
    const int tile = task->descending ? task->num_k_tiles - 1 - idx / heads : idx / heads;
    return {task,
            tile,
            batch_head % task->q_heads,
            batch_head / task->q_heads,
            task->band.first_query_tile(tile * kKeys, kRows),
            task->band.last_query_tile((tile + 1) * kKeys, task->q_len, kRows)};
}

// kHeadDim is kColumns rounded up to what the kernel handles; the copies fill in zeros.
template <typename T_, int kColumns_>
struct BackwardShape {
    using T = T_;
    static constexpr int kColumns = kColumns_;
    static constexpr bool kWide = kColumns > 128;
    static constexpr int kHeadDim = kColumns == 64 ? 64 : kWide ? 256 : 128;
    static constexpr int kRows = 64;   // queries of a tile
    static constexpr int kKeys = kWide ? 64 : 128;  // keys of a tile
    static constexpr int kWarpgroups = 2;
    static constexpr int kThreads = 384;
    static constexpr int kQueryStages = kWide ? 2 : 3;  // Q outlives dO, whose product comes early
    static constexpr int kStages = 2;                   // dO
    static constexpr int kSlabs = kHeadDim / kSlab;
    static constexpr int kQuerySlabBytes = kRows * kSlab * 2;
    static constexpr int kKeySlabBytes = kKeys * kSlab * 2;
    static constexpr int kPiece = kHeadDim / 2;  // columns of dQ that one warpgroup computes
    // From registers dS costs less shared-memory traffic, but at 128 there are none to spare.
    static constexpr bool kDsFromRegisters = kHeadDim == 64;
    static_assert(kRows == 64 && kColumns <= 256);

    struct Storage {
        alignas(1024) char k[kSlabs * kKeySlabBytes];
        alignas(1024) char v[kSlabs * kKeySlabBytes];
        alignas(1024) char q[kQueryStages][kSlabs * kQuerySlabBytes];
        alignas(1024) char dout[kStages][kSlabs * kQuerySlabBytes];
        alignas(1024) char ds[2][kKeys * kRows * 2];  // keys by queries
        union {
            alignas(1024) char p[2][kWide ? kKeys * kRows * 2 : 1];    // like ds
            alignas(1024) char dq[2][kWide ? 1 : kRows * kPiece * 4];  // fp32, 32 columns a slab
        };
        alignas(16) float lse_log2[kQueryStages][kRows];  // +inf where a row takes no part
        alignas(16) float delta[kQueryStages][kRows];
        uint64_t kv_full, kv_empty;
        uint64_t q_full[kQueryStages], q_empty[kQueryStages];  // Q, LSE and delta
        uint64_t dout_full[kStages], dout_empty[kStages];
        uint64_t tile_full[2], tile_empty[2];
        int tile[2];
    };
    static constexpr int kSharedBytes = sizeof(Storage);
};

// ---------------------------------------------------------------- producers

// Takes units from the counter and copies K, V, and the Q and dO tiles. One thread.
template <typename S>
__device__ inline void produce_tensors(const BackwardParams& params, typename S::Storage& smem) {
    Ring<S::kQueryStages> q_ring;
    Ring<S::kStages> dout_ring;
    Ring<2> tiles;
    uint32_t kv_phase = 0;
    int idx = next_tile(params.tile_counter, params.num_tiles);
    while (true) {
        barrier_wait(&smem.tile_empty[tiles.stage], tiles.phase ^ 1);
        smem.tile[tiles.stage] = idx;
        barrier_arrive(&smem.tile_full[tiles.stage]);
        tiles.advance();
        if (idx >= params.num_tiles) return;
        const KeyTile at = locate_key_tile<S::kRows, S::kKeys>(params, idx);
        if (at.first_query_tile >= at.last_query_tile) {
            idx = next_tile(params.tile_counter, params.num_tiles);
            continue;
        }
        const int kv_head = at.head / at.task->heads_per_kv;
        barrier_wait(&smem.kv_empty, kv_phase ^ 1);
        kv_phase ^= 1;
        barrier_arrive_expect(&smem.kv_full, 2 * S::kSlabs * S::kKeySlabBytes);
        for (int slab = 0; slab < S::kSlabs; ++slab) {
            tensor_load(smem.k + slab * S::kKeySlabBytes, &at.task->k, &smem.kv_full,
                        slab * kSlab, at.tile * S::kKeys, kv_head, at.batch);
            tensor_load(smem.v + slab * S::kKeySlabBytes, &at.task->v, &smem.kv_full,
                        slab * kSlab, at.tile * S::kKeys, kv_head, at.batch);
        }
        for (int m = at.first_query_tile; m < at.last_query_tile; ++m) {
            int s = q_ring.stage;
            barrier_wait(&smem.q_empty[s], q_ring.phase ^ 1);
            barrier_arrive_expect(&smem.q_full[s], S::kSlabs * S::kQuerySlabBytes);
            for (int slab = 0; slab < S::kSlabs; ++slab)
                tensor_load(smem.q[s] + slab * S::kQuerySlabBytes, &at.task->q, &smem.q_full[s],
                            slab * kSlab, m * S::kRows, at.head, at.batch);
            q_ring.advance();
            s = dout_ring.stage;
            barrier_wait(&smem.dout_empty[s], dout_ring.phase ^ 1);
            barrier_arrive_expect(&smem.dout_full[s], S::kSlabs * S::kQuerySlabBytes);
            for (int slab = 0; slab < S::kSlabs; ++slab)
                tensor_load(smem.dout[s] + slab * S::kQuerySlabBytes, &at.task->dout,
                            &smem.dout_full[s], slab * kSlab, m * S::kRows, at.head, at.batch);
            dout_ring.advance();
        }
        idx = next_tile(params.tile_counter, params.num_tiles);
    }
}

// Brings LSE and delta, whose strides a bulk copy could not follow. One warp.
template <typename S>
__device__ inline void produce_rows(const BackwardParams& params, typename S::Storage& smem) {
    const int lane = threadIdx.x % 32;
    Ring<S::kQueryStages> ring;
    Ring<2> tiles;
    while (true) {
        barrier_wait(&smem.tile_full[tiles.stage], tiles.phase);
        const int idx = smem.tile[tiles.stage];
        __syncwarp();
        if (lane == 0) barrier_arrive(&smem.tile_empty[tiles.stage]);
        tiles.advance();
        if (idx >= params.num_tiles) return;

        const KeyTile at = locate_key_tile<S::kRows, S::kKeys>(params, idx);
        const BackwardTaskParams& task = *at.task;
        const float* lse =
            task.lse + at.batch * task.lse_stride.batch + at.head * task.lse_stride.head;
        const float* delta =
            task.delta + at.batch * task.delta_stride.batch + at.head * task.delta_stride.head;
        for (int m = at.first_query_tile; m < at.last_query_tile; ++m, ring.advance()) {
            barrier_wait(&smem.q_empty[ring.stage], ring.phase ^ 1);
#pragma unroll
            for (int i = lane; i < S::kRows; i += 32) {
                const int64_t row = m * S::kRows + i;
                const bool valid = row < task.q_len;
                const float x = valid ? lse[row * task.lse_stride.seq] : -INFINITY;
                smem.lse_log2[ring.stage][i] =
                    x == -INFINITY ? INFINITY : x * 1.4426950408889634f;
                smem.delta[ring.stage][i] = valid ? delta[row * task.delta_stride.seq] : 0.f;
            }
            barrier_arrive(&smem.q_full[ring.stage]);
        }
    }
}

// ---------------------------------------------------------------- dQ: from staging to memory

// Named barriers between a consumer warpgroup and the warp that sends its dQ: 128 + 32 threads.
struct DqHandover {
    int full, empty;
    __device__ explicit DqHandover(int warpgroup) : full(4 + warpgroup), empty(6 + warpgroup) {}
    __device__ void await_full() const { named_sync(full, 160); }
    __device__ void announce_full() const { named_arrive(full, 160); }
    __device__ void await_empty() const { named_sync(empty, 160); }
    __device__ void announce_empty() const { named_arrive(empty, 160); }
};

// Waits for one's turn at an order counter, and passes it on. One thread.
__device__ inline void await_turn(const int* counter, int turn) {
    int seen;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    } while (seen != turn);
}

__device__ inline void pass_turn(int* counter) {
    __threadfence();
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

// The counter of a warpgroup's part of dQ at a query tile, and this key tile's turn at it: key
// tiles add in descending order, starting with the last that the query tile sees.
template <typename S>
__device__ inline int* dq_order(const KeyTile& at, int m, int warpgroup, int& turn) {
    const BackwardTaskParams& task = *at.task;
    turn = task.band.last_tile((m + 1) * S::kRows, S::kKeys) - 1 - at.tile;
    const int64_t batch_head = int64_t(at.batch) * task.q_heads + at.head;
    return task.dq_order + (batch_head * task.num_q_tiles + m) * kOrderCounters + warpgroup;
}

// Adds a warpgroup's staged dQ to memory, tile after tile. One warp for each warpgroup, so that no
// consumer waits for copies or turns.
template <typename S>
__device__ inline void send_dq(const BackwardParams& params, typename S::Storage& smem,
                               int warpgroup) {
    const int lane = threadIdx.x % 32;
    const DqHandover handover(warpgroup);
    const char* const staging = smem.dq[warpgroup];
    Ring<2> tiles;
    handover.announce_empty();
    while (true) {
        barrier_wait(&smem.tile_full[tiles.stage], tiles.phase);
        const int idx = smem.tile[tiles.stage];
        __syncwarp();
        if (lane == 0) barrier_arrive(&smem.tile_empty[tiles.stage]);
        tiles.advance();
        if (idx >= params.num_tiles) break;

        const KeyTile at = locate_key_tile<S::kRows, S::kKeys>(params, idx);
        for (int m = at.first_query_tile; m < at.last_query_tile; ++m) {
            handover.await_full();
            if (lane == 0) {
                int turn = 0;
                int* order = nullptr;
                if (at.task->dq_order != nullptr) {
                    order = dq_order<S>(at, m, warpgroup, turn);
                    await_turn(order, turn);
                }
                for (int slab = 0; slab < S::kPiece / 32; ++slab)
                    tensor_add(&at.task->dq_add, staging + slab * S::kRows * 128,
                               warpgroup * S::kPiece + slab * 32, m * S::kRows, at.head, at.batch);
                bulk_commit();
                if (order != nullptr) {
                    bulk_wait();
                    pass_turn(order);
                } else {
                    bulk_wait_read();
                }
            }
            __syncwarp();
            handover.announce_empty();
        }
    }
    if (lane == 0) bulk_wait();  // shared memory outlives the last copies
}

// ---------------------------------------------------------------- consumers: pieces

__device__ inline void add_pair(float* at, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(x), "f"(y)
                 : "memory");
}

// Adds scale * x, a 64-row accumulator, to rows `row` and row + 8 (while below `end`) of an fp32
// matrix, columns `column` on.
template <int kColumns, int kCount>
__device__ inline void add_rows(const float (&x)[kCount], float* matrix, int64_t seq_stride,
                                int row, int end, int column, float scale) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (row + 8 * r >= end) continue;
        float* at = matrix + int64_t(row + 8 * r) * seq_stride + column + 2 * lane;
#pragma unroll
        for (int i = 0; i < kCount / 4; ++i)
            if (column + 8 * i < kColumns)
                add_pair(at + 8 * i, x[4 * i + 2 * r] * scale, x[4 * i + 2 * r + 1] * scale);
    }
}

// Writes scale * x, a 64-row accumulator, to shared memory in slabs of 32 fp32 columns with the
// 128-byte swizzle.
template <int kCount>
__device__ inline void stage_rows(char* staging, const float (&x)[kCount], int row, float scale) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int chunk = (i % 4 * 2 + lane / 2) ^ (row % 8);  // row + 8 has the same
            char* at = staging + i / 4 * 64 * 128 + (row + 8 * r) * 128 + chunk * 16 + lane % 2 * 8;
            *reinterpret_cast<float2*>(at) =
                make_float2(x[4 * i + 2 * r] * scale, x[4 * i + 2 * r + 1] * scale);
        }
}

// d [64 keys x queries] = A [64 keys x kHeadDim] B^T, both K-major in shared memory.
template <typename S, int kCount>
__device__ inline void issue_transposed(float (&d)[kCount], uint64_t keys, uint64_t queries) {
    pin(d);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < S::kHeadDim / 16; ++step) {
        const int slab = step / 4, column_bytes = step % 4 * 32;
        wgmma_ss<typename S::T, 0, 0>(
            d, operand_at(keys, slab * S::kKeySlabBytes + column_bytes),
            operand_at(queries, slab * S::kQuerySlabBytes + column_bytes), step > 0);
    }
    wgmma_commit();
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

// d [64 queries x kPiece] = dS [64 queries x keys] K [keys x kPiece], dS stored keys by queries.
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
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared_address(at)),
                     "r"(x[step][0]), "r"(x[step][1]), "r"(x[step][2]), "r"(x[step][3])
                     : "memory");
    }
}

// s <- exp2(scale s - lse) for the queries whose LSE (times log2 e) starts at `lse`.
template <int kCount>
__device__ inline void exponentiate(float (&s)[kCount], const float* lse, float scale_log2) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(lse + 8 * i + 2 * (threadIdx.x % 4));
        s[4 * i] = exp2_fast(s[4 * i] * scale_log2 - x.x);
        s[4 * i + 1] = exp2_fast(s[4 * i + 1] * scale_log2 - x.y);
        s[4 * i + 2] = exp2_fast(s[4 * i + 2] * scale_log2 - x.x);
        s[4 * i + 3] = exp2_fast(s[4 * i + 3] * scale_log2 - x.y);
    }
}

// dp <- p (dp - delta), the gradient of the scores.
template <int kCount>
__device__ inline void score_gradient(float (&dp)[kCount], const float (&p)[kCount],
                                      const float* delta) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(delta + 8 * i + 2 * (threadIdx.x % 4));
        dp[4 * i] = p[4 * i] * (dp[4 * i] - x.x);
        dp[4 * i + 1] = p[4 * i + 1] * (dp[4 * i + 1] - x.y);
        dp[4 * i + 2] = p[4 * i + 2] * (dp[4 * i + 2] - x.x);
        dp[4 * i + 3] = p[4 * i + 3] * (dp[4 * i + 3] - x.y);
    }
}

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

// ---------------------------------------------------------------- consumers

// Handing dS between the two warpgroups, two buffers deep. Named barriers 8-15: of each warpgroup
// two that say a buffer of its dS is full and two that say the other has read it.
struct DsExchange {
    int own, other;
    __device__ explicit DsExchange(int warpgroup)
        : own(8 + 4 * warpgroup), other(12 - 4 * warpgroup) {
        named_arrive(other + 2, 256);  // both buffers of the other are free at first
        named_arrive(other + 3, 256);
    }
    __device__ void await_free(int buffer) const { named_sync(own + 2 + buffer, 256); }
    __device__ void announce(int buffer) const { named_arrive(own + buffer, 256); }
    __device__ void await_other(int buffer) const { named_sync(other + buffer, 256); }
    __device__ void free_other(int buffer) const { named_arrive(other + 2 + buffer, 256); }
};

template <typename S>
__device__ inline void consume_backward(const BackwardParams& params, typename S::Storage& smem,
                                        int warpgroup) {
    using T = typename S::T;
    constexpr int kSteps = S::kRows / 16;
    constexpr int kQueryBytes = S::kSlabs * S::kQuerySlabBytes;
    constexpr int kDsBytes = sizeof(smem.ds[0]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int piece_column = warpgroup * S::kPiece;  // of this warpgroup's part of dQ
    const int key_in_tile = warpgroup * 64 + warp * 16 + lane / 4;

    const uint64_t k_rows = operand_k_major(smem.k + warpgroup * 64 * 128);
    const uint64_t v_rows = operand_k_major(smem.v + warpgroup * 64 * 128);
    const uint64_t k_columns = operand_mn_major(
        smem.k + piece_column / kSlab * S::kKeySlabBytes + piece_column % kSlab * 2,
        S::kKeySlabBytes);
    const uint64_t q_rows = operand_k_major(smem.q[0]), dout_rows = operand_k_major(smem.dout[0]);
    const uint64_t q_columns = operand_mn_major(smem.q[0], S::kQuerySlabBytes);
    const uint64_t dout_columns = operand_mn_major(smem.dout[0], S::kQuerySlabBytes);
    const uint64_t ds_columns = operand_mn_major(smem.ds[0], kDsBytes);
    const uint64_t ds_rows = operand_k_major(smem.ds[0] + warpgroup * 64 * 128);

    Ring<S::kQueryStages> ring;
    Ring<S::kStages> dout_ring;
    Ring<2> tiles;
    uint32_t kv_phase = 0;
    int ds_buffer = 0;
    const DqHandover handover(warpgroup);
    const DsExchange exchange(warpgroup);
    const auto release = [&](uint64_t* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };

    while (true) {
        barrier_wait(&smem.tile_full[tiles.stage], tiles.phase);
        const int idx = uniform(smem.tile[tiles.stage]);
        release(&smem.tile_empty[tiles.stage]);
        tiles.advance();
        if (idx >= params.num_tiles) return;
        const KeyTile at = locate_key_tile<S::kRows, S::kKeys>(params, idx);
        if (at.first_query_tile >= at.last_query_tile) continue;
        const BackwardTaskParams& task = *at.task;
        const int first_key = at.tile * S::kKeys + warpgroup * 64;
        const int key = at.tile * S::kKeys + key_in_tile;
        const GradientSink sink(at, warpgroup);

        float s[S::kRows / 2], dp[S::kRows / 2], dk[S::kHeadDim / 2], dv[S::kHeadDim / 2];
        float piece[S::kPiece / 2];
        uint32_t p16[kSteps][4], ds16[kSteps][4];
        const auto hand_over_dq = [&](int buffer_read) {
            exchange.free_other(buffer_read);
            handover.await_empty();
            stage_rows(smem.dq[warpgroup], piece, warp * 16 + lane / 4, params.scale);
            fence_async_shared();
            handover.announce_full();
        };
#pragma unroll
        for (int i = 0; i < S::kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
        pin(dk);
        pin(dv);

        barrier_wait(&smem.kv_full, kv_phase);
        kv_phase ^= 1;
        barrier_wait(&smem.q_full[ring.stage], ring.phase);
        issue_transposed<S>(s, k_rows, operand_at(q_rows, uniform(ring.stage) * kQueryBytes));
        int last_stage = 0;

        for (int m = at.first_query_tile; m < at.last_query_tile; ++m) {
            const int stage = uniform(ring.stage);
            const int buffer = uniform(ds_buffer);
            const int dout_stage = uniform(dout_ring.stage);
            barrier_wait(&smem.dout_full[dout_stage], dout_ring.phase);
            issue_transposed<S>(dp, v_rows, operand_at(dout_rows, dout_stage * kQueryBytes));
            wgmma_wait<1>();  // S of this tile; dK of the last one, too
            pin(s);
            pin(dk);
            if constexpr (S::kDsFromRegisters)
#pragma unroll
                for (int step = 0; step < kSteps; ++step) pin(ds16[step]);
            if (m > at.first_query_tile) release(&smem.q_empty[last_stage]);
            if (task.band.cuts(m * S::kRows, (m + 1) * S::kRows, first_key, first_key + 64))
                apply_mask_transposed(s, task.band, key, m * S::kRows + 2 * (lane % 4));
            exponentiate(s, smem.lse_log2[stage], params.scale_log2);
            pack_steps<T>(p16, s);
            uint32_t signs = 0;
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
#pragma unroll
                for (int i = 0; i < 4; ++i) signs |= p16[step][i];
            keep_before(int(signs) < 0);  // probabilities have no sign
            wgmma_wait<0>();
            pin(dp);
            issue_key_gradient<S>(dv, p16, operand_at(dout_columns, dout_stage * kQueryBytes));

            score_gradient(dp, s, smem.delta[stage]);
            pack_steps<T>(ds16, dp);
            const bool real = m > at.first_query_tile;
            exchange.await_free(buffer);
            store_transposed(smem.ds[buffer], ds16, warpgroup * 64 + warp * 16 + lane % 16, 0);
            fence_async_shared();
            named_sync(2 + warpgroup, 128);  // this warpgroup's dS, for dK
            exchange.announce(buffer);
            // dQ of the tile before; at first of stale numbers, unused: a product under a condition
            // would make the compiler serialise them all.
            if (real) exchange.await_other(buffer ^ 1);
            issue_query_gradient<S>(piece, operand_at(ds_columns, (buffer ^ 1) * kDsBytes),
                                    k_columns);
            if constexpr (S::kDsFromRegisters)
                issue_key_gradient<S>(dk, ds16, operand_at(q_columns, stage * kQueryBytes));
            else
                issue_key_gradient<S>(dk, operand_at(ds_rows, buffer * kDsBytes),
                                      operand_at(q_columns, stage * kQueryBytes));
            last_stage = stage;
            ring.advance();
            dout_ring.advance();
            // After the last tile these are scores of stale numbers, unused: a product under a
            // condition would make the compiler serialise them all.
            const bool more = m + 1 < at.last_query_tile;
            if (more) barrier_wait(&smem.q_full[ring.stage], ring.phase);
            const int next_stage = stage + 1 == S::kQueryStages ? 0 : stage + 1;  // stays uniform
            issue_transposed<S>(s, k_rows, operand_at(q_rows, next_stage * kQueryBytes));
            wgmma_wait<2>();  // dV, and dQ of the tile before
            pin(piece);
            pin(dv);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) pin(p16[step]);
            release(&smem.dout_empty[dout_stage]);

            if (real) hand_over_dq(buffer ^ 1);
            ds_buffer ^= 1;
        }
        wgmma_wait<0>();
        pin(s);
        pin(dk);
        release(&smem.q_empty[last_stage]);
        exchange.await_other(ds_buffer ^ 1);
        issue_query_gradient<S>(piece, operand_at(ds_columns, (ds_buffer ^ 1) * kDsBytes),
                                k_columns);
        wgmma_wait<0>();
        pin(piece);
        hand_over_dq(ds_buffer ^ 1);
        release(&smem.kv_empty);

        sink.add_dkv<S>(dk, dv, key, 0, params.scale);
    }
}

// Head dimensions above 128.
template <typename S>
__device__ inline void consume_backward_wide(const BackwardParams& params,
                                             typename S::Storage& smem, int warpgroup) {
    using T = typename S::T;
    constexpr int kQueryBytes = S::kSlabs * S::kQuerySlabBytes;
    constexpr int kTileBytes = sizeof(smem.ds[0]);
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int column = warpgroup * S::kPiece;  // of every gradient
    const int query_half = warpgroup * 32;     // of the scores

    const uint64_t k_rows = operand_k_major(smem.k), v_rows = operand_k_major(smem.v);
    const uint64_t q_rows = operand_k_major(smem.q[0] + query_half * 128);
    const uint64_t dout_rows = operand_k_major(smem.dout[0] + query_half * 128);
    const uint64_t k_columns =
        operand_mn_major(smem.k + column / kSlab * S::kKeySlabBytes, S::kKeySlabBytes);
    const uint64_t q_columns =
        operand_mn_major(smem.q[0] + column / kSlab * S::kQuerySlabBytes, S::kQuerySlabBytes);
    const uint64_t dout_columns =
        operand_mn_major(smem.dout[0] + column / kSlab * S::kQuerySlabBytes, S::kQuerySlabBytes);
    const uint64_t p_rows = operand_k_major(smem.p[0]), ds_rows = operand_k_major(smem.ds[0]);
    const uint64_t ds_columns = operand_mn_major(smem.ds[0], kTileBytes);

    Ring<S::kStages> ring;
    Ring<2> tiles;
    uint32_t kv_phase = 0, buffer = 0;
    const auto release = [&](uint64_t* barrier) {
        if (lane == 0) barrier_arrive(barrier);
    };

    while (true) {
        barrier_wait(&smem.tile_full[tiles.stage], tiles.phase);
        const int idx = uniform(smem.tile[tiles.stage]);
        release(&smem.tile_empty[tiles.stage]);
        tiles.advance();
        if (idx >= params.num_tiles) return;
        const KeyTile at = locate_key_tile<S::kRows, S::kKeys>(params, idx);
        if (at.first_query_tile >= at.last_query_tile) continue;
        const GradientSink sink(at, warpgroup);
        const Band& band = at.task->band;
        const int first_key = at.tile * S::kKeys, key = first_key + warp * 16 + lane / 4;

        float dk[S::kPiece / 2], dv[S::kPiece / 2];
#pragma unroll
        for (int i = 0; i < S::kPiece / 2; ++i) dk[i] = dv[i] = 0.f;
        barrier_wait(&smem.kv_full, kv_phase);
        kv_phase ^= 1;

        for (int m = at.first_query_tile; m < at.last_query_tile; ++m, ring.advance()) {
            const int stage = ring.stage, query = m * S::kRows + query_half;
            float s[16], dp[16], piece[S::kPiece / 2];
            uint32_t packed[2][4];
            barrier_wait(&smem.q_full[stage], ring.phase);
            issue_transposed<S>(s, k_rows, operand_at(q_rows, stage * kQueryBytes));
            barrier_wait(&smem.dout_full[stage], ring.phase);
            issue_transposed<S>(dp, v_rows, operand_at(dout_rows, stage * kQueryBytes));
            wgmma_wait<0>();
            pin(s);
            pin(dp);
            if (band.cuts(query, query + 32, first_key, first_key + S::kKeys))
                apply_mask_transposed(s, band, key, query + 2 * (lane % 4));
            exponentiate(s, smem.lse_log2[stage] + query_half, params.scale_log2);
            pack_steps<T>(packed, s);
            store_transposed(smem.p[buffer], packed, warp * 16 + lane % 16, query_half / 8);
            score_gradient(dp, s, smem.delta[stage] + query_half);
            pack_steps<T>(packed, dp);
            store_transposed(smem.ds[buffer], packed, warp * 16 + lane % 16, query_half / 8);
            fence_async_shared();
            named_sync(1, 256);  // both halves are there; the other buffers are free again
            issue_key_gradient<S>(dv, operand_at(p_rows, buffer * kTileBytes),
                                  operand_at(dout_columns, stage * kQueryBytes));
            issue_key_gradient<S>(dk, operand_at(ds_rows, buffer * kTileBytes),
                                  operand_at(q_columns, stage * kQueryBytes));
            issue_query_gradient<S>(piece, operand_at(ds_columns, buffer * kTileBytes),
                                    k_columns);
            buffer ^= 1;
            wgmma_wait<0>();
            pin(dv);
            pin(dk);
            pin(piece);
            release(&smem.dout_empty[stage]);
            release(&smem.q_empty[stage]);
            sink.add_dq<S>(piece, m, warp * 16 + lane / 4, params.scale);
        }
        release(&smem.kv_empty);
        sink.add_dkv<S>(dk, dv, key, column, params.scale);
    }
}

// ---------------------------------------------------------------- kernel

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
    // Dynamic shared memory starts at a multiple of 1024; a constant base saves registers.
    extern __shared__ __align__(1024) char raw[];
    auto& smem = *reinterpret_cast<typename S::Storage*>(raw);

    if (threadIdx.x == 0) {
        if (shared_address(raw) % 1024 != 0) asm volatile("trap;");
        constexpr int kWarps = 4 * S::kWarpgroups;
        barrier_init(&smem.kv_full, 1);
        barrier_init(&smem.kv_empty, kWarps);
        for (int s = 0; s < S::kStages; ++s) {
            barrier_init(&smem.dout_full[s], 1);
            barrier_init(&smem.dout_empty[s], kWarps);
        }
        for (int s = 0; s < S::kQueryStages; ++s) {
            barrier_init(&smem.q_full[s], 1 + 32);  // the copies and each lane that brings rows
            barrier_init(&smem.q_empty[s], kWarps);
        }
        for (int s = 0; s < 2; ++s) {
            barrier_init(&smem.tile_full[s], 1);
            barrier_init(&smem.tile_empty[s], kWarps + (S::kWide ? 1 : 3));
        }
        fence_barrier_init();
    }
    __syncthreads();

    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_release<24>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) {
            if (elect_one()) produce_tensors<S>(params, smem);
        } else if (warp == 1) {
            produce_rows<S>(params, smem);
        } else if constexpr (!S::kWide) {
            send_dq<S>(params, smem, warp - 2);
        }
    } else {
        registers_acquire<240>();
        if constexpr (S::kWide)
            consume_backward_wide<S>(params, smem, warpgroup - 1);
        else
            consume_backward<S>(params, smem, warpgroup - 1);
    }
}

}  // namespace distflash
