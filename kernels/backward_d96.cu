#include "backward_instance.cuh"

namespace distflash {

Kernel backward_kernel_d96(int dtype, bool) { return select_backward<96, 64>(dtype); }

}  // namespace distflash
