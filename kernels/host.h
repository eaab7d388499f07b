// Host-side helpers shared by the entry points: error sentences and checked launches.
#pragma once
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>

namespace distflash {

// Formats an error sentence into a thread-local buffer (valid until the thread's next error).
inline const char* error(const char* format, ...) {
    static thread_local char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    return text;
}

// NULL, or the sentence for a failed CUDA call.
inline const char* check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return nullptr;
    return error("%s failed: %s", what, cudaGetErrorString(code));
}

}  // namespace distflash
