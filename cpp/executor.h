// Executes the transfers of one plan, call after call; the caller launches the compute in between:
//
//   executor.begin(compute);
//   for step in 0 .. num_steps - 1:
//     executor.reach(compute);                // this step's transfers start from here on
//     ... merges and attention kernels on the compute stream, before or after the post ...
//     executor.post(step, sources, compute);  // runs on the side stream while this step computes
//     executor.wait(step + 1, compute);       // what the next step reads is here
//   executor.finish(compute);
//
// None of these waits on the host. Slots are reused as the plan says; what makes that safe is order:
// a group starts after the compute enqueued before its step was reached, and compute enqueued after
// its wait starts when the group is done with its sources and its targets. What is sent must stay as
// it is until a wait says that its step is done.
#pragma once

#include <memory>

#include "communicator.h"
#include "plan.h"

namespace distflash {

class Executor {
 public:
  Executor(std::shared_ptr<Communicator> communicator, RankPlan plan);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void begin(Stream compute);
  void reach(Stream compute);
  // ``sources``: the addresses of what the step sends, part by part.
  void post(int step, std::vector<std::uintptr_t> sources, Stream compute);
  // Everything that arrives for steps up to this one. Returns how many steps, from the first one on,
  // are then done with what they sent.
  int wait(int step, Stream compute);
  void finish(Stream compute);
  // For a caller that is asked for a call while it is inside of one: fails the communicator.
  [[noreturn]] void refuse_call() { communicator_->refuse(plan_->name, plan_->name); }

  // Whether the calls to come have ``close_step`` post a step's transfers, behind its kernels, and not
  // ``open_step``. They start at the same point of the compute stream; but a launch that comes behind
  // them in the hardware's queue waits until they have begun, and they wait for those before them.
  void set_late(bool is_late) { is_next_late_ = is_late; }
  bool is_late() const { return is_next_late_; }

  // All of the above around a step's compute, from the first step's begin to the last one's finish.
  // ``close_step`` returns what ``wait`` does.
  void open_step(int step, std::vector<std::uintptr_t> sources, Stream compute);
  int close_step(Stream compute);
  // What ``close_step`` will return in front of ``step``.
  int num_done(int step) const;

  Device& device() { return communicator_->device(); }
  std::uintptr_t workspace() const { return addresses_.workspace; }
  // For one-sided transports: this workspace's handle, and everybody's, in rank order.
  std::string export_workspace();
  void import_workspaces(const std::vector<std::string>& handles);
  // Every rank unmaps before any rank closes: memory must outlive its mappings. Waits until nothing
  // is in flight.
  void unmap_workspaces();

  // Gives the workspace back; a second call does nothing.
  void close();

 private:
  void require_call(const char* what) const;
  void wait_for_groups(int num_groups, Stream compute);
  void end_call();

  const std::shared_ptr<Communicator> communicator_;
  const std::shared_ptr<const RankPlan> plan_;
  bool is_late_ = false;          // this call
  bool is_next_late_ = false;
  Addresses addresses_;

  bool in_call_ = false;
  bool is_captured_ = false;      // this call goes into a CUDA graph
  int num_posted_ = 0;            // steps posted in this call, empty ones included
  int num_waited_ = 0;            // groups that compute is behind
  std::vector<std::uintptr_t> late_sources_;  // of the open step
  std::vector<Ticket*> tickets_;  // of the groups posted in this call
  int num_reached_ = 0;           // steps reached in this call
  std::unique_ptr<Event> reached_;  // the last of them
  // The compute of the last call is done with the slots: the next call may be on another stream.
  std::unique_ptr<Event> released_;
  bool has_released_ = false;  // a call that was not captured has ended
};

}  // namespace distflash
