#include "transport_host.h"

#include <chrono>
#include <cstring>
#include <thread>

namespace distflash {

struct Message {
  std::vector<std::pair<char*, std::size_t>> parts;
  bool is_copying = false;  // by the receiver: the sender must not return its memory now
  bool is_taken = false;
};

HostHub::HostHub(int num_ranks, unsigned seed, int max_jitter_us)
    : num_ranks_(num_ranks), seed_(seed), max_jitter_us_(max_jitter_us) {}

HostTransport::HostTransport(std::shared_ptr<HostHub> hub, int rank)
    : hub_(std::move(hub)), rank_(rank), random_(hub_->seed_ * 1000003u + rank) {}

void HostTransport::enqueue(const Group& group, const Addresses& addresses, Stream stream,
                            const std::function<void()>& record_start) {
  std::vector<Action> actions;
  for (const Transfer& transfer : group.transfers) {
    Action action{&transfer, {}};
    for (std::size_t i = 0; i < transfer.parts.size(); ++i) {
      action.parts.emplace_back(addresses.local(transfer, i), transfer.parts[i].num_bytes);
    }
    actions.push_back(std::move(action));
  }
  record_start();
  reinterpret_cast<HostStream*>(stream)->enqueue(
      [this, actions = std::move(actions)] { run(actions); });
}

void HostTransport::run(const std::vector<Action>& actions) {
  {
    std::lock_guard lock(hub_->mutex_);
    outstanding_.clear();
    for (const Action& action : actions) outstanding_.insert(action.transfer);
  }
  std::vector<std::pair<const Transfer*, std::shared_ptr<Message>>> offers;
  for (const Action& action : actions) {
    if (action.transfer->side == Side::send) offers.emplace_back(action.transfer, offer(action));
  }
  for (const Action& action : actions) {
    if (action.transfer->side == Side::receive) take(action);
  }
  std::unique_lock lock(hub_->mutex_);
  for (const auto& [transfer, message] : offers) {
    hub_->changed_.wait(lock, [&] {
      return message->is_taken || (!hub_->failure_.empty() && !message->is_copying);
    });
    if (message->is_taken) outstanding_.erase(transfer);
  }
  // After a failure offers stay where they are with stale pointers: nobody takes from then on.
}

std::shared_ptr<Message> HostTransport::offer(const Action& action) {
  jitter();
  auto message = std::make_shared<Message>();
  message->parts = action.parts;
  std::lock_guard lock(hub_->mutex_);
  hub_->offered_[{rank_, action.transfer->peer}].push_back(message);
  hub_->changed_.notify_all();
  return message;
}

void HostTransport::take(const Action& action) {
  jitter();
  std::unique_lock lock(hub_->mutex_);
  auto& queue = hub_->offered_[{action.transfer->peer, rank_}];
  hub_->changed_.wait(lock, [&] { return !queue.empty() || !hub_->failure_.empty(); });
  if (!hub_->failure_.empty()) return;
  auto message = queue.front();
  queue.pop_front();
  bool fits = message->parts.size() == action.parts.size();
  for (std::size_t i = 0; fits && i < action.parts.size(); ++i) {
    fits = message->parts[i].second == action.parts[i].second;
  }
  if (!fits) {
    hub_->failure_ = "the two ranks disagree about the size of " + action.transfer->name;
    hub_->changed_.notify_all();
    return;
  }
  message->is_copying = true;
  lock.unlock();
  jitter();
  for (std::size_t i = 0; i < action.parts.size(); ++i) {
    std::memcpy(action.parts[i].first, message->parts[i].first, action.parts[i].second);
  }
  lock.lock();
  message->is_copying = false;
  message->is_taken = true;
  outstanding_.erase(action.transfer);
  hub_->changed_.notify_all();
}

void HostTransport::jitter() {
  if (hub_->max_jitter_us_ == 0) return;
  std::uniform_int_distribution<int> sleep_us(0, hub_->max_jitter_us_);
  std::this_thread::sleep_for(std::chrono::microseconds(sleep_us(random_)));
}

std::optional<std::string> HostTransport::asynchronous_error() {
  std::lock_guard lock(hub_->mutex_);
  if (hub_->failure_.empty()) return std::nullopt;
  return "the group was ended: " + hub_->failure_;
}

std::vector<const Transfer*> HostTransport::pending(const Group& group) {
  std::lock_guard lock(hub_->mutex_);
  std::vector<const Transfer*> found;
  for (const Transfer& transfer : group.transfers) {
    // None: the watchdog asks before the group's first action, when all are.
    if (outstanding_.empty() || outstanding_.count(&transfer) > 0) found.push_back(&transfer);
  }
  return found;
}

void HostTransport::abort(const std::string& reason) {
  std::lock_guard lock(hub_->mutex_);
  if (hub_->failure_.empty()) hub_->failure_ = reason;
  hub_->changed_.notify_all();
}

}  // namespace distflash
