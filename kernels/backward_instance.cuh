// Body of the backward_d*.cu files: the kernels of one head dimension.
#pragma once
#include "api.h"
#include "backward_sm90.cuh"
#include "launch.h"

namespace distflash {

template <typename S>
Kernel describe_backward() {
    return {reinterpret_cast<const void*>(&backward_kernel<S>), S::kThreads, S::kSharedBytes,
            S::kRows, S::kKeys, S::kRows, S::kPieceRows};
}

// kRows: queries of a tile.
template <int kHeadDim, int kRows>
Kernel select_backward(int dtype) {
    return dtype == DISTFLASH_BF16 ? describe_backward<BackwardShape<bf16, kHeadDim, kRows>>()
                                   : describe_backward<BackwardShape<fp16, kHeadDim, kRows>>();
}

}  // namespace distflash
