#include "backward_instance.cuh"

namespace distflash {

Kernel backward_kernel_d64(int dtype, bool) { return select_backward<64, 128>(dtype); }

}  // namespace distflash
