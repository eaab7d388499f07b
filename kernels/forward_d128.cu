#include "forward_instance.cuh"

namespace distflash {

Kernel forward_kernel_d128(int dtype, bool masked) {
    return select_forward<128, 176, 128, 2>(dtype, masked);
}

}  // namespace distflash
