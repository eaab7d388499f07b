#include "forward_instance.cuh"

namespace distflash {

Kernel forward_kernel_d64(int dtype, bool masked) {
    return select_forward<64, 128, 128, 3>(dtype, masked);
}

}  // namespace distflash
