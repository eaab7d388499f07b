#include "forward_instance.cuh"

namespace distflash {

Kernel forward_kernel_d192(int dtype, bool masked) {
    return select_forward<192, 96, 96, 2>(dtype, masked);
}

}  // namespace distflash
