#include "backward_instance.cuh"

namespace distflash {

Kernel backward_kernel_d256(int dtype, bool) { return select_backward<256, 64>(dtype); }

}  // namespace distflash
