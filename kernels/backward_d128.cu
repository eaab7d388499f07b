#include "backward_instance.cuh"

namespace distflash {

Kernel backward_kernel_d128(int dtype, bool) { return select_backward<128, 64>(dtype); }

}  // namespace distflash
