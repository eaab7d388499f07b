#include "forward_instance.cuh"

namespace distflash {

Kernel forward_kernel_d96(int dtype, bool masked) {
    return select_forward<96, 128, 128, 2>(dtype, masked);
}

}  // namespace distflash
