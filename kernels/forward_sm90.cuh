// The forward kernel: what its warps do (forward_pieces.cuh, forward_narrow.cuh).
#pragma once
#include "forward_narrow.cuh"

namespace distflash {

template <typename S>
__global__ void __launch_bounds__(S::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(1024) char raw[];
    auto& smem = storage_at<typename S::Storage>(raw);

    if (threadIdx.x == 0) {
        constexpr int kWarps = 4 * S::kWarpgroups;  // each consumer warp releases for itself
        for (int w = 0; w < S::kWarpgroups; ++w) {
            barrier_init(&smem.q_full[w], 1);
            barrier_init(&smem.q_empty[w], 4);
        }
        for (int s = 0; s < S::kStages; ++s) {
            barrier_init(&smem.k_full[s], 1);
            barrier_init(&smem.v_full[s], 1);
            barrier_init(&smem.k_empty[s], kWarps);
            barrier_init(&smem.v_empty[s], kWarps);
        }
        init_tiles(smem, S::kNarrow ? kWarps + 1 : kWarps);  // and the warp that prefetches
        fence_barrier_init();
    }
    __syncthreads();

    const int warpgroup = uniform(threadIdx.x / 128);
    if (warpgroup == 0) {
        registers_release<S::kProducerRegisters>();
        const int warp = uniform(threadIdx.x / 32);
        if (warp == 0 && elect_one()) produce<S>(params, smem);
        if constexpr (S::kNarrow)
            if (warp == 1) prefetch_states<S>(params, smem);
    } else {
        registers_acquire<S::kConsumerRegisters>();
        if constexpr (S::kNarrow)
            consume_narrow<S>(params, smem, warpgroup - 1);
        else
            consume<S>(params, smem, warpgroup - 1);
    }
}

}  // namespace distflash
