// Streams, events and memory of a device that is only threads of this process: a stream is a thread
// that runs closures in order. Everything the executor relies on is asynchronous here too.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "device.h"

namespace distflash {

class HostStream {
 public:
  HostStream();
  ~HostStream();  // runs what was enqueued first
  void enqueue(std::function<void()> work);
  void synchronize();
  Stream handle() { return reinterpret_cast<Stream>(this); }

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_running_ = false;  // the thread is inside a closure
  bool is_ending_ = false;
  std::thread thread_;
};

class HostDevice final : public Device {
 public:
  Stream side_stream() override { return side_.handle(); }
  std::unique_ptr<Event> create_event() override;
  void record(Event& event, Stream stream) override;
  void wait(Stream stream, Event& event) override;
  void wait_behind(Stream stream, Event& event) override { wait(stream, event); }
  bool is_complete(Event& event) override;
  bool is_capturing(Stream) override { return false; }
  std::size_t granularity_bytes() const override { return 1; }
  void* allocate(std::size_t num_bytes) override;
  void release(void* pointer) override;
  void copy(const Rows& to, const Rows& from, const Extent& extent, Stream stream) override;
  void fill(const Rows& rows, const Extent& extent, std::uint32_t word, Stream stream) override;
  // Nothing computes on: on the host a wait throws where a stream would be let go.
  void poison(void*, std::size_t) override {}
  void quiesce(double) override { side_.synchronize(); }
  void attach_thread() override {}

 private:
  HostStream side_;
};

}  // namespace distflash
