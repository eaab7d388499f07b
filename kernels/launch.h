// Between the entry points (launch.cu) and the translation units that hold one kernel set each.
#pragma once
#include <cuda_runtime.h>

namespace distflash {

// A compiled kernel and the tile geometry its parameters must be laid out for.
struct Kernel {
    const void* function;
    int threads, shared_bytes;
    int rows, keys;  // queries and keys of a tile
    int row_box;     // rows of one bulk copy of Q and dO
    int add_box;     // rows of one bulk addition to dQ
};

// `masked`: whether some task of the launch is causal or windowed.
#define DISTFLASH_KERNEL_SET(d)                     \
    Kernel forward_kernel_d##d(int dtype, bool masked); \
    Kernel backward_kernel_d##d(int dtype, bool masked);
DISTFLASH_KERNEL_SET(64)
DISTFLASH_KERNEL_SET(96)
DISTFLASH_KERNEL_SET(128)
DISTFLASH_KERNEL_SET(192)
DISTFLASH_KERNEL_SET(256)
#undef DISTFLASH_KERNEL_SET

}  // namespace distflash
