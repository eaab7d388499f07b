// One rank's end of a context-parallel group: a device, a transport on its side stream, memory that
// the transport can reach, and the watchdog that owns every wait.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "device.h"
#include "plan.h"
#include "transport.h"

namespace distflash {

using Clock = std::chrono::steady_clock;

// Raised for everything that went wrong between ranks; Python sees CommunicationError.
class CommunicationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The events of one posted group. The communicator owns them and hands them out again when the
// executor's call and the watchdog are both done with them.
struct Ticket {
  std::unique_ptr<Event> ready;  // the side stream came to the group, and compute to its step
  std::unique_ptr<Event> start;  // the side stream comes to the transfers themselves
  std::unique_ptr<Event> done;   // everything arrived, everything sent may be overwritten
  bool is_held = false;          // by an executor
  bool is_in_flight = false;
};

// A group on its way. Its clock starts when the side stream reaches it: the compute before it is
// done and so is the group before it. Until then nobody is late.
struct Flight {
  std::shared_ptr<const RankPlan> plan;
  const Group* group;
  Ticket* ticket;
  bool has_started = false;
  Clock::time_point started_at{};
};

// For which groups of a call compute is held until they have begun. A group begins when those before
// it have ended, so holding compute for later ones may expose them.
enum class Hold { never, first, always };

class Communicator {
 public:
  Communicator(int rank, int num_ranks, double deadline_s, std::unique_ptr<Device> device,
               std::unique_ptr<Transport> transport, Hold hold = Hold::first);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  Device& device() { return *device_; }
  Transport& transport() { return *transport_; }

  // Throws CommunicationError if something failed since the communicator was made, or it is closed.
  void check();

  // Memory that transfers may read and write.
  void* allocate(std::size_t num_bytes);
  void release(void* pointer);
  std::size_t memory_reserved_bytes() const;

  // For executors. A call occupies the communicator: ranks agree on the order of transfers only if
  // calls do not interleave.
  void enter(const std::string& who);
  void leave();
  // Fails, and throws, since a call of ``who`` was begun inside one of ``other``.
  [[noreturn]] void refuse(const std::string& who, const std::string& other);
  // Posts one of the plan's groups, to start when ``reached`` has passed. Compute that follows may
  // be held until the transfers have begun, if it ``may_hold``: kernels that occupy every
  // multiprocessor would keep them out. The ticket is the caller's until ``give_back``.
  Ticket* post(std::shared_ptr<const RankPlan> plan, const Group& group, const Addresses& addresses,
               Event& reached, Stream compute, bool is_captured, bool may_hold);
  void give_back(Ticket* ticket);
  // Ends the communicator for everybody: posted groups are aborted, every later call throws.
  void fail(const std::string& message);

  // Waits until nothing is in flight, or it was aborted: hardly longer than the deadline.
  void drain();
  // Lets go of what peers gave; every rank does so before any closes, since memory must outlive its
  // mappings. No call may follow.
  void unmap_peers();
  // Gives everything back. What is still in flight after ``patience_s`` is aborted. A second call
  // does nothing.
  void close(double patience_s);

 private:
  void watch();
  std::string look_at_flights();
  bool is_late(const Flight& flight) const;
  std::string describe_late(const Flight& flight);
  Ticket* take_ticket();
  void retire(Ticket* ticket);

  const int rank_;
  const int num_ranks_;
  const double deadline_s_;
  const Hold hold_;
  const std::unique_ptr<Device> device_;
  const std::unique_ptr<Transport> transport_;

  mutable std::mutex mutex_;  // guards everything below
  std::condition_variable wake_;
  std::condition_variable landed_;
  std::deque<Flight> flights_;
  // The post that a thread is inside of: a transport may block there while a peer is missing.
  std::optional<Flight> posting_;
  std::vector<std::unique_ptr<Ticket>> tickets_;
  std::vector<Ticket*> idle_tickets_;
  std::map<void*, std::size_t> allocations_;
  std::string busy_with_;
  std::string failure_;
  bool is_closing_ = false;
  bool has_aborted_ = false;                // fail() is through
  std::atomic<bool> has_failed_ = false;  // failure_ is set; read without the lock
  std::thread watchdog_;
};

}  // namespace distflash
