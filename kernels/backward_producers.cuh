// The warps of the backward that feed the consumers and carry dQ away.
#pragma once
#include "backward_params.cuh"

namespace distflash {

// Takes units from the counter and copies K, V, and the Q and dO tiles. One thread.
template <typename S>
__device__ inline void produce_tensors(const BackwardParams& params, typename S::Storage& smem) {
    Ring<S::kStages> ring;
    TileSource tiles;
    uint32_t kv_phase = 0;
    while (true) {
        const int idx = tiles.next(params, smem);
        if (idx >= params.num_tiles) return;
        const KeyTile at = locate_key_tile<S>(params, idx);
        if (at.empty()) continue;
        const BackwardTaskParams& task = *at.task;
        const int kv_head = at.head / task.heads_per_kv;
        barrier_wait(&smem.kv_empty, kv_phase ^ 1);
        kv_phase ^= 1;
        barrier_arrive_expect(&smem.kv_full, 2 * S::kSlabs * S::kKeySlabBytes);
        for (int slab = 0; slab < S::kSlabs; ++slab) {
            tensor_load(smem.k + slab * S::kKeySlabBytes, &task.k, &smem.kv_full, slab * kSlab,
                        at.tile * S::kKeys, kv_head, at.batch);
            tensor_load(smem.v + slab * S::kKeySlabBytes, &task.v, &smem.kv_full, slab * kSlab,
                        at.tile * S::kKeys, kv_head, at.batch);
        }
        const auto load = [&](char* tile, const CUtensorMap* map, uint64_t* full, uint64_t* empty,
                              int m) {
            barrier_wait(empty, ring.phase ^ 1);
            barrier_arrive_expect(full, S::kQueryBytes);
            for (int slab = 0; slab < S::kSlabs; ++slab)
                tensor_load(tile + slab * S::kQuerySlabBytes, map, full, slab * kSlab,
                            m * S::kRows, at.head, at.batch);
        };
        for (int m = at.first_query_tile; m < at.last_query_tile; ++m, ring.advance()) {
            const int s = ring.stage;
            load(smem.q[s], &task.q, &smem.q_full[s], &smem.q_empty[s], m);
            load(smem.dout[s], &task.dout, &smem.dout_full[s], &smem.dout_empty[s], m);
        }
    }
}

// Brings LSE and delta, whose strides a bulk copy could not follow. One warp.
template <typename S>
__device__ inline void produce_rows(const BackwardParams& params, typename S::Storage& smem) {
    Ring<S::kStages> ring;
    TileFeed tiles;
    while (true) {
        const int idx = tiles.next(smem);
        if (idx >= params.num_tiles) return;
        const KeyTile at = locate_key_tile<S>(params, idx);
        const BackwardTaskParams& task = *at.task;
        const float* lse =
            task.lse + at.batch * task.lse_stride.batch + at.head * task.lse_stride.head;
        const float* delta =
            task.delta + at.batch * task.delta_stride.batch + at.head * task.delta_stride.head;
        for (int m = at.first_query_tile; m < at.last_query_tile; ++m, ring.advance()) {
            barrier_wait(&smem.q_empty[ring.stage], ring.phase ^ 1);
#pragma unroll
            for (int i = threadIdx.x % 32; i < S::kRows; i += 32) {
                const int64_t row = int64_t(m) * S::kRows + i;
                const bool valid = row < task.q_len;
                const float x = valid ? lse[row * task.lse_stride.seq] : -INFINITY;
                smem.lse_log2[ring.stage][row_place(i)] =
                    x == -INFINITY ? INFINITY : x * 1.4426950408889634f;
                smem.delta[ring.stage][row_place(i)] =
                    valid ? delta[row * task.delta_stride.seq] : 0.f;
            }
            barrier_arrive(&smem.q_full[ring.stage]);
        }
    }
}

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
    const bool sender = threadIdx.x % 32 == 0;
    const int column = S::kSplitQueries ? 0 : warpgroup * 64;
    const int row = S::kSplitQueries ? warpgroup * S::kPieceRows : 0;
    const char* const staging = smem.staging[warpgroup];
    Ring<1> ring;
    TileFeed tiles;
    while (true) {
        const int idx = tiles.next(smem);
        if (idx >= params.num_tiles) break;
        const KeyTile at = locate_key_tile<S>(params, idx);
        for (int m = at.first_query_tile; m < at.last_query_tile; ++m, ring.advance()) {
            barrier_wait(&smem.dq_full[warpgroup], ring.phase);
            if (sender) {
                int turn = 0;
                int* order = nullptr;
                if (at.task->dq_order != nullptr) {
                    order = dq_order<S>(at, m, warpgroup, turn);
                    await_turn(order, turn);
                }
                for (int slab = 0; slab < 2; ++slab)
                    tensor_add(&at.task->dq_add, staging + slab * S::kPieceRows * 128,
                               column + slab * 32, m * S::kRows + row, at.head, at.batch);
                bulk_commit();
                bulk_wait_read();
                barrier_arrive(&smem.dq_empty[warpgroup]);
                if (order != nullptr) {
                    bulk_wait();
                    pass_turn(order);
                }
            }
            __syncwarp();
        }
    }
    if (sender) bulk_wait();  // shared memory outlives the last copies
}

}  // namespace distflash
