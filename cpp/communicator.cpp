#include "communicator.h"

#include <algorithm>
#include <cstdio>
#include <iomanip>
#include <sstream>

namespace distflash {

namespace {

// How often the watchdog looks: often enough for short deadlines in tests, seldom enough to cost
// nothing in training.
std::chrono::duration<double> watch_period(double deadline_s) {
  return std::chrono::duration<double>(std::clamp(deadline_s / 20, 0.001, 0.05));
}

// Nobody waits for a destructor on purpose: at exit the peers are often gone.
constexpr double destructor_patience_s = 2;

}  // namespace

Communicator::Communicator(int rank, int num_ranks, double deadline_s,
                           std::unique_ptr<Device> device, std::unique_ptr<Transport> transport,
                           Hold hold)
    : rank_(rank),
      num_ranks_(num_ranks),
      deadline_s_(deadline_s),
      hold_(hold),
      device_(std::move(device)),
      transport_(std::move(transport)) {
  if (!(deadline_s > 0)) throw std::invalid_argument("the deadline must be more than 0 seconds");
  watchdog_ = std::thread(&Communicator::watch, this);
}

Communicator::~Communicator() {
  try {
    close(destructor_patience_s);
  } catch (const std::exception&) {
    // The failure was thrown where it mattered; a destructor has nobody to tell.
  }
}

void Communicator::check() {
  // Before the watchdog looks again an aborted group may end like a good one.
  if (!has_failed_) {
    if (auto error = transport_->asynchronous_error()) {
      fail("rank " + std::to_string(rank_) + ": " + *error);
    }
  }
  if (has_failed_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex_);
    throw CommunicationError(failure_);
  }
}

// ---- memory ---------------------------------------------------------------------------------------

void* Communicator::allocate(std::size_t num_bytes) {
  check();
  const std::size_t granularity_bytes = device_->granularity_bytes();
  num_bytes = (num_bytes + granularity_bytes - 1) / granularity_bytes * granularity_bytes;
  void* pointer = device_->allocate(num_bytes);
  std::lock_guard lock(mutex_);
  allocations_[pointer] = num_bytes;
  return pointer;
}

void Communicator::release(void* pointer) {
  {
    std::lock_guard lock(mutex_);
    if (allocations_.erase(pointer) == 0) return;  // close() was faster
  }
  device_->release(pointer);
}

std::size_t Communicator::memory_reserved_bytes() const {
  std::lock_guard lock(mutex_);
  std::size_t total = 0;
  for (const auto& [pointer, num_bytes] : allocations_) total += num_bytes;
  return total;
}

// ---- calls ----------------------------------------------------------------------------------------

void Communicator::enter(const std::string& who) {
  check();
  std::string other;
  {
    std::lock_guard lock(mutex_);
    if (is_closing_) throw CommunicationError("the communicator is closed");
    if (busy_with_.empty()) busy_with_ = who;
    else other = busy_with_;
  }
  if (!other.empty()) refuse(who, other);
}

void Communicator::refuse(const std::string& who, const std::string& other) {
  fail("rank " + std::to_string(rank_) + " started a call of the " + who +
       " plan before its call of the " + other +
       " plan had ended (by an error inside it, or from another thread); the ranks are out of step");
  std::lock_guard lock(mutex_);
  throw CommunicationError(failure_);
}

void Communicator::leave() {
  std::lock_guard lock(mutex_);
  busy_with_.clear();
}

Ticket* Communicator::post(std::shared_ptr<const RankPlan> plan, const Group& group,
                           const Addresses& addresses, Event& reached, Stream compute,
                           bool is_captured, bool may_hold) {
  check();
  Ticket* ticket = take_ticket();
  const bool is_first = &group == &plan->groups.front();
  const bool is_held = may_hold && (hold_ == Hold::always || (hold_ == Hold::first && is_first));
  {
    std::lock_guard lock(mutex_);
    posting_ = Flight{plan, &group, ticket, true, Clock::now()};
    if (flights_.empty()) wake_.notify_one();
  }
  const Stream side = device_->side_stream();
  std::string problem;
  try {
    device_->wait(side, reached);
    device_->record(*ticket->ready, side);
    transport_->enqueue(group, addresses, side, [&] {
      if (is_held) device_->record(*ticket->start, side);
    });
    if (is_captured) transport_->note_capture();
    device_->record(*ticket->done, side);
    if (is_held) device_->wait_behind(compute, *ticket->start);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  {
    std::lock_guard lock(mutex_);
    posting_.reset();
    // A captured group runs at every replay, where no host code can watch it.
    ticket->is_in_flight = problem.empty() && !is_captured;
    if (ticket->is_in_flight) flights_.push_back({plan, &group, ticket});
  }
  if (!problem.empty()) {
    fail("rank " + std::to_string(rank_) + ", step " + std::to_string(group.step) +
         " of the " + plan->name + " plan: " + problem);
    check();
  }
  if (has_failed_) {
    // The abort may have ended before this group was enqueued, and does not come back for it. Not
    // before it has ended: it lets nothing go until memory is poisoned.
    std::unique_lock lock(mutex_);
    landed_.wait(lock, [&] { return has_aborted_; });
    lock.unlock();
    transport_->abort("posted during an abort");
    check();
  }
  return ticket;
}

Ticket* Communicator::take_ticket() {
  std::lock_guard lock(mutex_);
  if (is_closing_) throw CommunicationError("the communicator is closed");
  if (idle_tickets_.empty()) {
    auto fresh = std::make_unique<Ticket>();
    fresh->ready = device_->create_event();
    fresh->start = device_->create_event();
    fresh->done = device_->create_event();
    idle_tickets_.push_back(fresh.get());
    tickets_.push_back(std::move(fresh));
  }
  Ticket* ticket = idle_tickets_.back();
  idle_tickets_.pop_back();
  ticket->is_held = true;
  return ticket;
}

void Communicator::give_back(Ticket* ticket) {
  std::lock_guard lock(mutex_);
  ticket->is_held = false;
  retire(ticket);
}

void Communicator::retire(Ticket* ticket) {
  if (!ticket->is_held && !ticket->is_in_flight) idle_tickets_.push_back(ticket);
}

// ---- the watchdog ---------------------------------------------------------------------------------

void Communicator::watch() {
  device_->attach_thread();
  const auto period = watch_period(deadline_s_);
  std::unique_lock lock(mutex_);
  while (!is_closing_) {
    if (flights_.empty() && !posting_) {
      wake_.wait(lock, [&] { return is_closing_ || !flights_.empty() || posting_; });
    } else {
      wake_.wait_for(lock, period, [&] { return is_closing_; });
    }
    const std::string message = look_at_flights();
    if (message.empty()) continue;
    lock.unlock();
    // Python raises this at its next call into us, but may be blocked elsewhere, where the user
    // would see nothing.
    std::fprintf(stderr, "megatron_distflash: %s\n", message.c_str());
    fail(message);
    return;
  }
}

// Lands what is done; returns what is wrong, or nothing. Needs the lock.
std::string Communicator::look_at_flights() {
  if (posting_ && is_late(*posting_)) return describe_late(*posting_);
  if (flights_.empty()) return "";
  // First, because what was aborted ends too.
  if (auto error = transport_->asynchronous_error()) {
    const Flight& first = flights_.front();
    return "rank " + std::to_string(rank_) + ", step " + std::to_string(first.group->step) +
           " of the " + first.plan->name + " plan: " + *error;
  }
  while (!flights_.empty() && !has_failed_ &&
         device_->is_complete(*flights_.front().ticket->done)) {
    flights_.front().ticket->is_in_flight = false;
    retire(flights_.front().ticket);
    flights_.pop_front();
  }
  if (flights_.empty()) {
    landed_.notify_all();
    return "";
  }
  Flight& first = flights_.front();
  if (!first.has_started && device_->is_complete(*first.ticket->ready)) {
    first.has_started = true;
    first.started_at = Clock::now();
  }
  return is_late(first) ? describe_late(first) : "";
}

bool Communicator::is_late(const Flight& flight) const {
  const std::chrono::duration<double> limit(deadline_s_);
  return flight.has_started && Clock::now() - flight.started_at > limit;
}

std::string Communicator::describe_late(const Flight& flight) {
  std::ostringstream text;
  text << "rank " << rank_ << ", step " << flight.group->step << " of the " << flight.plan->name
       << " plan: no end after " << std::setprecision(4) << deadline_s_ << " s of";
  const char* separator = " ";
  for (const Transfer* transfer : transport_->pending(*flight.group)) {
    const bool is_send = transfer->side == Side::send;
    text << separator << (is_send ? "sending " : "receiving ") << transfer->name << " ("
         << transfer->num_bytes() << " bytes), peer rank " << transfer->peer;
    separator = ", nor of ";
  }
  text << "; see whether that rank died or is stuck, or raise --distflash-timeout if it is only slow";
  return text.str();
}

void Communicator::fail(const std::string& message) {
  std::map<void*, std::size_t> allocations;
  {
    std::lock_guard lock(mutex_);
    if (has_failed_) return;
    failure_ = message;
    has_failed_.store(true, std::memory_order_release);
    allocations = allocations_;
  }
  // Kernels that wait for the transfers run on after the abort. They must not read old bytes as if
  // they had arrived.
  for (const auto& [pointer, num_bytes] : allocations) device_->poison(pointer, num_bytes);
  transport_->abort(message);
  {
    std::lock_guard lock(mutex_);
    has_aborted_ = true;
  }
  landed_.notify_all();
}

void Communicator::drain() {
  std::unique_lock lock(mutex_);
  // The watchdog keeps the deadline: what is in flight lands or fails.
  landed_.wait(lock, [&] { return flights_.empty() || has_aborted_; });
}

void Communicator::unmap_peers() {
  drain();
  transport_->unmap_peers();
}

void Communicator::close(double patience_s) {
  bool is_stuck = false;
  {
    std::unique_lock lock(mutex_);
    if (is_closing_) return;
    const std::chrono::duration<double> patience(patience_s);
    is_stuck = !landed_.wait_for(lock, patience, [&] { return flights_.empty() || has_failed_; });
  }
  if (is_stuck) fail("rank " + std::to_string(rank_) + " closed while transfers were in flight");
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  wake_.notify_all();
  watchdog_.join();
  device_->quiesce(deadline_s_);
  transport_->close(deadline_s_);
  std::lock_guard lock(mutex_);
  for (const auto& [pointer, num_bytes] : allocations_) device_->release(pointer);
  allocations_.clear();
}

}  // namespace distflash
