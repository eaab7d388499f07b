// The current CUDA context as a Device.
#pragma once

#include "cuda_driver.h"
#include "device.h"

namespace distflash {

inline CUstream cuda_stream(Stream stream) { return reinterpret_cast<CUstream>(stream); }
inline CUdeviceptr device_pointer(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

class CudaDevice final : public Device {
 public:
  // Takes the calling thread's context, which has to exist: call into CUDA once before.
  CudaDevice();
  ~CudaDevice() override;

  Stream side_stream() override { return reinterpret_cast<Stream>(side_); }
  // For memory that has to be written while the side stream is stuck.
  CUstream rescue_stream() const { return rescue_; }

  std::unique_ptr<Event> create_event() override;
  void record(Event& event, Stream stream) override;
  void wait(Stream stream, Event& event) override;
  void wait_behind(Stream stream, Event& event) override;
  bool is_complete(Event& event) override;
  bool is_capturing(Stream stream) override;
  std::size_t granularity_bytes() const override { return std::size_t{2} << 20; }
  void* allocate(std::size_t num_bytes) override;
  void release(void* pointer) override;
  void poison(void* pointer, std::size_t num_bytes) override;
  void copy(const Rows& to, const Rows& from, const Extent& extent, Stream stream) override;
  void fill(const Rows& rows, const Extent& extent, std::uint32_t word, Stream stream) override;
  void quiesce(double deadline_s) override;
  void attach_thread() override;

 private:
  CUcontext context_ = nullptr;
  CUstream side_ = nullptr;
  CUstream rescue_ = nullptr;
  // See ``wait_behind``.
  CUstream detour_ = nullptr;
  std::unique_ptr<Event> passed_;
};

// Whether the stream became idle (or broke) within the time; never blocks longer.
bool is_idle_within(CUstream stream, double limit_s);

}  // namespace distflash
