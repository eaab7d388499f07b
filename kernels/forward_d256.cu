#include "forward_instance.cuh"

namespace distflash {

Kernel forward_kernel_d256(int dtype, bool masked) {
    return select_forward<256, 64, 64, 2>(dtype, masked);
}

}  // namespace distflash
