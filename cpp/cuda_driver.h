// The CUDA driver, found at run time: the module loads on machines without one, and works with
// whatever CUDA version torch was built for.
#pragma once

#include <cuda.h>

namespace distflash {

// cuda.h maps some of these names to newer versions of themselves by macro; the expansion carries
// over to the members below and to the symbols that are looked up.
#define DISTFLASH_DRIVER_FUNCTIONS(use)                                                       \
  use(cuGetErrorString) use(cuCtxGetCurrent) use(cuCtxSetCurrent)                             \
  use(cuCtxGetStreamPriorityRange) use(cuThreadExchangeStreamCaptureMode)                     \
  use(cuStreamCreateWithPriority) use(cuStreamDestroy) use(cuStreamQuery)                     \
  use(cuStreamWaitEvent) use(cuStreamIsCapturing) use(cuStreamBatchMemOp)                     \
  use(cuEventCreate) use(cuEventDestroy) use(cuEventRecord) use(cuEventQuery)                 \
  use(cuMemAlloc) use(cuMemFree) use(cuMemsetD8Async) use(cuMemsetD32Async)                   \
  use(cuMemcpyAsync) use(cuMemcpy3DAsync) use(cuMemsetD2D32Async)                             \
  use(cuIpcGetMemHandle) use(cuIpcOpenMemHandle) use(cuIpcCloseMemHandle)

struct CudaDriver {
#define DISTFLASH_DECLARE(function) decltype(&::function) function;
  DISTFLASH_DRIVER_FUNCTIONS(DISTFLASH_DECLARE)
#undef DISTFLASH_DECLARE

  // The process's driver. Throws std::runtime_error if there is none.
  static const CudaDriver& get();
};

// Throws std::runtime_error with the driver's words unless the result is success.
void check_cuda(CUresult result, const char* what);

// DISTFLASH_CUDA(cuEventRecord, event, stream) calls and checks.
#define DISTFLASH_CUDA(function, ...) \
  ::distflash::check_cuda(::distflash::CudaDriver::get().function(__VA_ARGS__), #function)

}  // namespace distflash
