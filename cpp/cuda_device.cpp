#include "cuda_device.h"

#include <chrono>
#include <stdexcept>
#include <thread>

namespace distflash {

namespace {

constexpr double poison_limit_s = 2;

struct CudaEvent final : Event {
  CUevent event = nullptr;
  CudaEvent() { DISTFLASH_CUDA(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING); }
  ~CudaEvent() override { CudaDriver::get().cuEventDestroy(event); }
};

CUevent cuda_event(Event& event) { return static_cast<CudaEvent&>(event).event; }

}  // namespace

CudaDevice::CudaDevice() {
  DISTFLASH_CUDA(cuCtxGetCurrent, &context_);
  if (context_ == nullptr) throw std::runtime_error("this thread has no CUDA context yet");
  int lowest = 0, highest = 0;
  DISTFLASH_CUDA(cuCtxGetStreamPriorityRange, &lowest, &highest);
  // High priority: transfers are short, and a step that waits for one computes nothing.
  DISTFLASH_CUDA(cuStreamCreateWithPriority, &side_, CU_STREAM_NON_BLOCKING, highest);
  DISTFLASH_CUDA(cuStreamCreateWithPriority, &rescue_, CU_STREAM_NON_BLOCKING, highest);
  DISTFLASH_CUDA(cuStreamCreateWithPriority, &detour_, CU_STREAM_NON_BLOCKING, lowest);
  passed_ = create_event();
}

CudaDevice::~CudaDevice() {
  // Results are ignored: at exit the context may be gone already, and the streams with it.
  CudaDriver::get().cuStreamDestroy(side_);
  CudaDriver::get().cuStreamDestroy(rescue_);
  CudaDriver::get().cuStreamDestroy(detour_);
}

std::unique_ptr<Event> CudaDevice::create_event() { return std::make_unique<CudaEvent>(); }

void CudaDevice::record(Event& event, Stream stream) {
  DISTFLASH_CUDA(cuEventRecord, cuda_event(event), cuda_stream(stream));
}

void CudaDevice::wait(Stream stream, Event& event) {
  DISTFLASH_CUDA(cuStreamWaitEvent, cuda_stream(stream), cuda_event(event), 0);
}

void CudaDevice::wait_behind(Stream stream, Event& event) {
  // The next kernel of the event's own stream follows within a microsecond or two; another stream
  // learns of an event later, and through a third one twice as late.
  const auto detour = reinterpret_cast<Stream>(detour_);
  wait(detour, event);
  record(*passed_, detour);
  wait(stream, *passed_);
}

bool CudaDevice::is_complete(Event& event) {
  // A broken context is not "not yet"; the next call into the driver tells the caller.
  return CudaDriver::get().cuEventQuery(cuda_event(event)) != CUDA_ERROR_NOT_READY;
}

bool CudaDevice::is_capturing(Stream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  DISTFLASH_CUDA(cuStreamIsCapturing, cuda_stream(stream), &status);
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void* CudaDevice::allocate(std::size_t num_bytes) {
  CUdeviceptr pointer = 0;
  DISTFLASH_CUDA(cuMemAlloc, &pointer, num_bytes);
  return reinterpret_cast<void*>(pointer);
}

void CudaDevice::release(void* pointer) {
  CudaDriver::get().cuMemFree(device_pointer(pointer));  // at exit the context may be gone
}

void CudaDevice::poison(void* pointer, std::size_t num_bytes) {
  // 0xFF…: not a number in bf16, fp16, fp32 and fp64.
  CudaDriver::get().cuMemsetD8Async(device_pointer(pointer), 0xFF, num_bytes, rescue_);
  is_idle_within(rescue_, poison_limit_s);
}

void CudaDevice::copy(const Rows& to, const Rows& from, const Extent& extent, Stream stream) {
  CUDA_MEMCPY3D copy{};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = from.start;
  copy.srcPitch = from.row_bytes;
  copy.srcHeight = from.block_bytes / from.row_bytes;
  copy.dstDevice = to.start;
  copy.dstPitch = to.row_bytes;
  copy.dstHeight = to.block_bytes / to.row_bytes;
  copy.WidthInBytes = extent.num_bytes;
  copy.Height = extent.num_rows;
  copy.Depth = extent.num_blocks;
  DISTFLASH_CUDA(cuMemcpy3DAsync, &copy, cuda_stream(stream));
}

void CudaDevice::fill(const Rows& rows, const Extent& extent, std::uint32_t word, Stream stream) {
  DISTFLASH_CUDA(cuMemsetD2D32Async, rows.start, rows.row_bytes, word,
                 extent.num_bytes / sizeof(word), extent.num_rows, cuda_stream(stream));
}

void CudaDevice::quiesce(double deadline_s) { is_idle_within(side_, deadline_s); }

void CudaDevice::attach_thread() {
  DISTFLASH_CUDA(cuCtxSetCurrent, context_);
  // Otherwise a look at an event would break a graph that another thread captures.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  DISTFLASH_CUDA(cuThreadExchangeStreamCaptureMode, &mode);
}

bool is_idle_within(CUstream stream, double limit_s) {
  const auto begun = std::chrono::steady_clock::now();
  while (CudaDriver::get().cuStreamQuery(stream) == CUDA_ERROR_NOT_READY) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begun;
    if (passed.count() > limit_s) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace distflash
