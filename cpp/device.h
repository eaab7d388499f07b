// What the executor needs of a device: streams, events and memory. Two implementations: CUDA
// (cuda_device.h) and threads of this process (host_device.h), so that the executor's ordering is
// tested where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace distflash {

// A stream of the caller or of the device: CUstream, HostStream*, or 0, the default stream. On the
// host the default stream is the calling thread itself: work on it is done at once.
using Stream = std::uintptr_t;

class Event {
 public:
  virtual ~Event() = default;
};

// A stack of blocks of rows: row [z][y] begins z * block_bytes + y * row_bytes behind the first one,
// and its bytes lie together.
struct Rows {
  std::uintptr_t start;
  std::int64_t row_bytes;
  std::int64_t block_bytes;  // a multiple of row_bytes
};

struct Extent {
  std::int64_t num_bytes;  // of a row
  std::int64_t num_rows;   // of a block
  std::int64_t num_blocks;
};

class Device {
 public:
  virtual ~Device() = default;

  // The stream that transfers run on.
  virtual Stream side_stream() = 0;

  virtual std::unique_ptr<Event> create_event() = 0;
  virtual void record(Event& event, Stream stream) = 0;
  // Work enqueued on the stream from now on starts after what the event was last recorded for.
  virtual void wait(Stream stream, Event& event) = 0;
  // The same, and a moment later: work that another stream starts after the event comes first.
  virtual void wait_behind(Stream stream, Event& event) = 0;
  virtual bool is_complete(Event& event) = 0;

  // Whether the stream's work goes into a CUDA graph instead of being run.
  virtual bool is_capturing(Stream stream) = 0;

  // Memory is handed out in multiples of this.
  virtual std::size_t granularity_bytes() const = 0;
  virtual void* allocate(std::size_t num_bytes) = 0;
  virtual void release(void* pointer) = 0;
  // Fills memory with not-a-number, so that results computed from it cannot pass for results.
  virtual void poison(void* pointer, std::size_t num_bytes) = 0;

  // Device memory to device memory, in the stream's order.
  virtual void copy(const Rows& to, const Rows& from, const Extent& extent, Stream stream) = 0;
  // Fills the rows of one block with 32-bit words.
  virtual void fill(const Rows& rows, const Extent& extent, std::uint32_t word, Stream stream) = 0;

  // After an abort: returns when the side stream is idle, or gives up after the deadline.
  virtual void quiesce(double deadline_s) = 0;

  // To be called by every thread of ours before it touches the device.
  virtual void attach_thread() = 0;
};

}  // namespace distflash
