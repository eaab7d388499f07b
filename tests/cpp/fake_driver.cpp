// A stand-in for libcuda.so.1 with what cpp/cuda_driver.h asks for: a stream is a thread, device
// memory is the process's, and handles to it are its addresses. So the transports that need a driver
// and nothing else are tested on machines without a GPU, with all ranks in one process.
#include <cuda.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// Outlives its handle: as with a real one, what was enqueued still runs.
struct StreamState {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool is_running = false;
  bool is_ending = false;

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return is_ending || !queue.empty(); });
      if (queue.empty()) return;
      auto work = std::move(queue.front());
      queue.pop_front();
      is_running = true;
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      is_running = false;
    }
  }
};

struct EventState {
  std::atomic<unsigned long> num_recorded = 0;
  std::atomic<unsigned long> num_completed = 0;
};

using StreamHandle = std::shared_ptr<StreamState>;
using EventHandle = std::shared_ptr<EventState>;

StreamState& state_of(CUstream stream) { return **reinterpret_cast<StreamHandle*>(stream); }
EventHandle& state_of(CUevent event) { return *reinterpret_cast<EventHandle*>(event); }

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(20)); }

void enqueue(CUstream stream, std::function<void()> work) {
  StreamState& state = state_of(stream);
  std::lock_guard lock(state.mutex);
  state.queue.push_back(std::move(work));
  state.changed.notify_all();
}

std::atomic<unsigned>& flag_at(CUdeviceptr address) {
  return *reinterpret_cast<std::atomic<unsigned>*>(address);
}

std::mutex mappings_mutex;
std::map<CUdeviceptr, int> num_mappings;

// What the calling thread does when it unmaps memory.
thread_local std::function<void()> before_unmapping;

// Device memory knows no races: after an abort it is poisoned while it is copied.
#if defined(__SANITIZE_THREAD__)
#define DEVICE_ACCESS __attribute__((no_sanitize("thread"), noinline))
#else
#define DEVICE_ACCESS
#endif

DEVICE_ACCESS void fill_words(CUdeviceptr to, unsigned word, size_t count) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<volatile unsigned*>(to)[i] = word;
}

DEVICE_ACCESS void fill_bytes(CUdeviceptr to, unsigned char byte, size_t count) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<volatile unsigned char*>(to)[i] = byte;
}

DEVICE_ACCESS void copy_bytes(CUdeviceptr to, CUdeviceptr from, size_t count) {
  const auto* source = reinterpret_cast<const volatile unsigned char*>(from);
  for (size_t i = 0; i < count; ++i) reinterpret_cast<volatile unsigned char*>(to)[i] = source[i];
}

}  // namespace

extern "C" {

// For tests: a closure in the stream's order.
void fake_enqueue(CUstream stream, std::function<void()>* work) {
  enqueue(stream, std::move(*work));
}

// For tests: what the calling thread does from now on before it unmaps memory.
void fake_before_unmapping(std::function<void()>* work) { before_unmapping = std::move(*work); }

CUresult cuGetErrorString(CUresult, const char** words) {
  *words = "refused by the stand-in";
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(1);
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = *highest = 0;
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
  auto* handle = new StreamHandle(std::make_shared<StreamState>());
  std::thread([state = *handle] { state->run(); }).detach();
  *stream = reinterpret_cast<CUstream>(handle);
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
  {
    StreamState& state = state_of(stream);
    std::lock_guard lock(state.mutex);
    state.is_ending = true;
    state.changed.notify_all();
  }
  delete reinterpret_cast<StreamHandle*>(stream);
  return CUDA_SUCCESS;
}
CUresult cuStreamQuery(CUstream stream) {
  StreamState& state = state_of(stream);
  std::lock_guard lock(state.mutex);
  return state.queue.empty() && !state.is_running ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  enqueue(stream, [state = state_of(event), ticket = state_of(event)->num_recorded.load()] {
    while (state->num_completed < ticket) nap();
  });
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned) {
  *event = reinterpret_cast<CUevent>(new EventHandle(std::make_shared<EventState>()));
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
  delete reinterpret_cast<EventHandle*>(event);
  return CUDA_SUCCESS;
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  enqueue(stream, [state = state_of(event), ticket = ++state_of(event)->num_recorded] {
    state->num_completed = ticket;
  });
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent event) {
  const EventHandle& state = state_of(event);
  return state->num_completed >= state->num_recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamBatchMemOp(CUstream stream, unsigned count, CUstreamBatchMemOpParams* operations,
                               unsigned) {
  if (count == 0 || count >= 256) return CUDA_ERROR_INVALID_VALUE;
  enqueue(stream, [batch = std::vector(operations, operations + count)] {
    for (const CUstreamBatchMemOpParams& operation : batch) {
      if (operation.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
        flag_at(operation.writeValue.address) = operation.writeValue.value;
      } else {
        while (flag_at(operation.waitValue.address) != operation.waitValue.value) nap();
      }
    }
  });
  return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* pointer, size_t num_bytes) {
  *pointer = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(256, (num_bytes + 255) / 256 * 256));
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr pointer) {
  {
    std::lock_guard lock(mappings_mutex);
    if (num_mappings[pointer] != 0) {
      std::fprintf(stderr, "memory is given back that somebody still maps\n");
      std::abort();
    }
  }
  std::free(reinterpret_cast<void*>(pointer));
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t count, CUstream stream) {
  enqueue(stream, [=] { fill_bytes(to, byte, count); });
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr to, unsigned word, size_t count, CUstream stream) {
  enqueue(stream, [=] {
    for (size_t i = 0; i < count; ++i) flag_at(to + 4 * i) = word;
  });
  return CUDA_SUCCESS;
}
CUresult cuMemsetD2D32Async(CUdeviceptr to, size_t pitch, unsigned word, size_t width,
                               size_t height, CUstream stream) {
  enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) fill_words(to + row * pitch, word, width);
  });
  return CUDA_SUCCESS;
}
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t num_bytes, CUstream stream) {
  enqueue(stream, [=] { copy_bytes(to, from, num_bytes); });
  return CUDA_SUCCESS;
}
CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D* copy, CUstream stream) {
  enqueue(stream, [copy = *copy] {
    for (size_t z = 0; z < copy.Depth; ++z) {
      for (size_t y = 0; y < copy.Height; ++y) {
        copy_bytes(copy.dstDevice + (z * copy.dstHeight + y) * copy.dstPitch,
                   copy.srcDevice + (z * copy.srcHeight + y) * copy.srcPitch, copy.WidthInBytes);
      }
    }
  });
  return CUDA_SUCCESS;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  std::memset(handle, 0, sizeof(*handle));
  std::memcpy(handle, &pointer, sizeof(pointer));
  return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle(CUdeviceptr* pointer, CUipcMemHandle handle, unsigned) {
  std::memcpy(pointer, &handle, sizeof(*pointer));
  std::lock_guard lock(mappings_mutex);
  ++num_mappings[*pointer];
  return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  if (before_unmapping) before_unmapping();
  std::lock_guard lock(mappings_mutex);
  --num_mappings[pointer];
  return CUDA_SUCCESS;
}

}  // extern "C"
