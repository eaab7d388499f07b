// Transfers between ranks that are threads of one process. For tests: it has the semantics of the
// GPU transports (a group ends when everything arrived and everything sent was taken), and can be
// made to sleep at every turn to provoke orders that are rare in life.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "host_device.h"
#include "transport.h"

namespace distflash {

struct Message;  // what one send offers, see transport_host.cpp

// Where the threads of a group meet.
class HostHub {
 public:
  // ``max_jitter_us``: before each of its actions a rank sleeps for a random time up to this.
  explicit HostHub(int num_ranks, unsigned seed = 0, int max_jitter_us = 0);
  int num_ranks() const { return num_ranks_; }

 private:
  friend class HostTransport;
  const int num_ranks_;
  const unsigned seed_;
  const int max_jitter_us_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Sends that wait for their receive: [source, target], in order.
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> offered_;
  std::string failure_;  // the first abort's reason; it ends the group for all ranks
};

class HostTransport final : public Transport {
 public:
  HostTransport(std::shared_ptr<HostHub> hub, int rank);
  const char* name() const override { return "host"; }
  void enqueue(const Group& group, const Addresses& addresses, Stream stream,
               const std::function<void()>& record_start) override;
  std::optional<std::string> asynchronous_error() override;
  std::vector<const Transfer*> pending(const Group& group) override;
  void abort(const std::string& reason) override;
  void close(double) override {}

 private:
  struct Action {
    const Transfer* transfer;
    std::vector<std::pair<char*, std::size_t>> parts;
  };
  void run(const std::vector<Action>& actions);
  std::shared_ptr<Message> offer(const Action& action);
  void take(const Action& action);
  void jitter();

  const std::shared_ptr<HostHub> hub_;
  const int rank_;
  std::mt19937 random_;                    // the side stream's thread only
  std::set<const Transfer*> outstanding_;  // of the running group; guarded by the hub's mutex
};

}  // namespace distflash
