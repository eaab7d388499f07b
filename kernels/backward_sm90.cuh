// Backward attention into fp32 accumulators, Hopper.
//
// A unit of work is one tile of keys of one query head: K and V stay in shared memory, dK and dV in
// the registers of two consumer warpgroups, and the loop runs over the query tiles that see the
// keys. See backward_consumer.cuh for head dimensions up to 128 and backward_wide.cuh above.
//
// dQ leaves through shared memory and the copy engine's add, sent by a warp of its own (from
// registers it cost a quarter of the time: 32-byte requests, and wgmma waiting for registers that
// additions still held). dK and dV, once a unit, leave by vector reductions straight from
// registers. If order counters are given, they make the additions to one tile happen in a fixed
// order.
#pragma once
#include "backward_consumer.cuh"
#include "backward_wide.cuh"

namespace distflash {

template <typename S>
__device__ inline void init_backward(typename S::Storage& smem) {
    constexpr int kWarps = 4 * S::kWarpgroups;
    barrier_init(&smem.kv_full, 1);
    barrier_init(&smem.kv_empty, kWarps);
    for (int s = 0; s < S::kStages; ++s) {
        barrier_init(&smem.q_full[s], 1 + 32);  // the copies and each lane that brings rows
        barrier_init(&smem.q_empty[s], kWarps);
        barrier_init(&smem.dout_full[s], 1);
        barrier_init(&smem.dout_empty[s], kWarps);
        barrier_init(&smem.ds_full[s], kWarps);
        barrier_init(&smem.ds_empty[s], kWarps);
    }
    for (int w = 0; w < S::kWarpgroups; ++w) {
        barrier_init(&smem.dq_full[w], 4);
        barrier_init(&smem.dq_empty[w], 1);
    }
    init_tiles(smem, kWarps + (S::kWide ? 1 : 1 + S::kWarpgroups));
    fence_barrier_init();
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(1024) char raw[];
    auto& smem = storage_at<typename S::Storage>(raw);
    if (threadIdx.x == 0) init_backward<S>(smem);
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
