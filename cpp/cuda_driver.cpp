#include "cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace distflash {

namespace {

#define DISTFLASH_QUOTE(text) #text
#define DISTFLASH_NAME(function) DISTFLASH_QUOTE(function)

template <typename Function>
void load(void* library, const char* name, Function& pointer) {
  pointer = reinterpret_cast<Function>(dlsym(library, name));
  if (pointer == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver is too old: it has no ") + name);
  }
}

CudaDriver load_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("there is no CUDA driver (libcuda.so.1)");
  CudaDriver driver;
#define DISTFLASH_LOAD(function) load(library, DISTFLASH_NAME(function), driver.function);
  DISTFLASH_DRIVER_FUNCTIONS(DISTFLASH_LOAD)
#undef DISTFLASH_LOAD
  return driver;
}

}  // namespace

const CudaDriver& CudaDriver::get() {
  static const CudaDriver driver = load_driver();
  return driver;
}

void check_cuda(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* words = nullptr;
  CudaDriver::get().cuGetErrorString(result, &words);
  throw std::runtime_error(std::string(what) + " failed: " +
                           (words == nullptr ? "CUDA error " + std::to_string(result) : words));
}

}  // namespace distflash
