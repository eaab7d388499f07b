#include "host_device.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace distflash {

// ---- streams --------------------------------------------------------------------------------------

HostStream::HostStream() : thread_(&HostStream::run, this) {}

HostStream::~HostStream() {
  {
    std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void HostStream::enqueue(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void HostStream::synchronize() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return queue_.empty() && !is_running_; });
}

void HostStream::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto work = std::move(queue_.front());
    queue_.pop_front();
    is_running_ = true;
    lock.unlock();
    work();
    work = nullptr;
    lock.lock();
    is_running_ = false;
    changed_.notify_all();
  }
}

// ---- events ---------------------------------------------------------------------------------------

namespace {

// Counts records, so that a wait means the record before it and not a later one. Closures share the
// state: they may run when the event itself is gone.
struct EventState {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t num_recorded = 0;
  std::uint64_t num_completed = 0;

  void complete(std::uint64_t ticket) {
    std::lock_guard lock(mutex);
    num_completed = std::max(num_completed, ticket);
    changed.notify_all();
  }
  void await(std::uint64_t ticket) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return num_completed >= ticket; });
  }
};

struct HostEvent final : Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

EventState& state_of(Event& event) { return *static_cast<HostEvent&>(event).state; }

// Runs the work on the stream; the default stream is the calling thread.
void enqueue_on(Stream stream, std::function<void()> work) {
  if (stream == 0) return work();
  reinterpret_cast<HostStream*>(stream)->enqueue(std::move(work));
}

}  // namespace

std::unique_ptr<Event> HostDevice::create_event() { return std::make_unique<HostEvent>(); }

void HostDevice::record(Event& event, Stream stream) {
  auto state = static_cast<HostEvent&>(event).state;
  std::uint64_t ticket;
  {
    std::lock_guard lock(state->mutex);
    ticket = ++state->num_recorded;
  }
  enqueue_on(stream, [state, ticket] { state->complete(ticket); });
}

void HostDevice::wait(Stream stream, Event& event) {
  auto state = static_cast<HostEvent&>(event).state;
  std::uint64_t ticket;
  {
    std::lock_guard lock(state->mutex);
    ticket = state->num_recorded;
  }
  enqueue_on(stream, [state, ticket] { state->await(ticket); });
}

bool HostDevice::is_complete(Event& event) {
  EventState& state = state_of(event);
  std::lock_guard lock(state.mutex);
  return state.num_completed >= state.num_recorded;
}

// ---- memory ---------------------------------------------------------------------------------------

void* HostDevice::allocate(std::size_t num_bytes) {
  return ::operator new(num_bytes, std::align_val_t(256));
}

void HostDevice::copy(const Rows& to, const Rows& from, const Extent& extent, Stream stream) {
  enqueue_on(stream, [=] {
    for (std::int64_t z = 0; z < extent.num_blocks; ++z) {
      for (std::int64_t y = 0; y < extent.num_rows; ++y) {
        std::memcpy(reinterpret_cast<void*>(to.start + z * to.block_bytes + y * to.row_bytes),
                    reinterpret_cast<void*>(from.start + z * from.block_bytes + y * from.row_bytes),
                    extent.num_bytes);
      }
    }
  });
}

void HostDevice::fill(const Rows& rows, const Extent& extent, std::uint32_t word, Stream stream) {
  enqueue_on(stream, [=] {
    for (std::int64_t y = 0; y < extent.num_rows; ++y) {
      auto* row = reinterpret_cast<std::uint32_t*>(rows.start + y * rows.row_bytes);
      std::fill_n(row, extent.num_bytes / static_cast<std::int64_t>(sizeof(word)), word);
    }
  });
}

void HostDevice::release(void* pointer) {
  side_.synchronize();  // a group that was aborted may still be inside a copy
  ::operator delete(pointer, std::align_val_t(256));
}

}  // namespace distflash
