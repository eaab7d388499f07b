// Body of the forward_d*.cu files: the kernels of one head dimension.
#pragma once
#include "api.h"
#include "forward_sm90.cuh"
#include "launch.h"

namespace distflash {

template <typename S>
Kernel describe_forward() {
    return {reinterpret_cast<const void*>(&forward_kernel<S>), S::kThreads, S::kSharedBytes,
            S::kRows, S::kKeys, 64, 0};
}

// kFullKeys, kMaskedKeys: keys of a tile without and with causal or window masks (smaller tiles
// waste less work along the diagonal).
template <int kHeadDim, int kFullKeys, int kMaskedKeys, int kWarpgroups>
Kernel select_forward(int dtype, bool masked) {
    if (dtype == DISTFLASH_BF16)
        return masked ? describe_forward<ForwardShape<bf16, kHeadDim, kMaskedKeys, kWarpgroups>>()
                      : describe_forward<ForwardShape<bf16, kHeadDim, kFullKeys, kWarpgroups>>();
    return masked ? describe_forward<ForwardShape<fp16, kHeadDim, kMaskedKeys, kWarpgroups>>()
                  : describe_forward<ForwardShape<fp16, kHeadDim, kFullKeys, kWarpgroups>>();
}

}  // namespace distflash
