#include "backward_instance.cuh"

namespace distflash {

Kernel backward_kernel_d192(int dtype, bool) { return select_backward<192, 64>(dtype); }

}  // namespace distflash
