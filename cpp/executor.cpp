#include "executor.h"

#include <string>

namespace distflash {

Executor::Executor(std::shared_ptr<Communicator> communicator, RankPlan plan)
    : communicator_(std::move(communicator)),
      plan_(std::make_shared<const RankPlan>(std::move(plan))) {
  if (plan_->rank != communicator_->rank() || plan_->num_ranks != communicator_->num_ranks()) {
    throw std::invalid_argument("the plan is for rank " + std::to_string(plan_->rank) + " of " +
                                std::to_string(plan_->num_ranks) + ", the communicator is rank " +
                                std::to_string(communicator_->rank()) + " of " +
                                std::to_string(communicator_->num_ranks()));
  }
  released_ = communicator_->device().create_event();
  reached_ = communicator_->device().create_event();
  if (plan_->workspace_bytes > 0) {
    void* workspace = communicator_->allocate(plan_->workspace_bytes);
    addresses_.workspace = reinterpret_cast<std::uintptr_t>(workspace);
  }
}

Executor::~Executor() { close(); }

std::string Executor::export_workspace() {
  if (workspace() == 0) return "";
  return communicator_->transport().export_memory(reinterpret_cast<void*>(workspace()));
}

void Executor::import_workspaces(const std::vector<std::string>& handles) {
  if (static_cast<int>(handles.size()) != plan_->num_ranks) {
    throw std::invalid_argument("one workspace handle per rank is needed");
  }
  addresses_.peer_workspaces.assign(plan_->num_ranks, 0);
  for (int peer = 0; peer < plan_->num_ranks; ++peer) {
    if (peer == plan_->rank || handles[peer].empty()) continue;
    void* mapped = communicator_->transport().import_memory(handles[peer]);
    addresses_.peer_workspaces[peer] = reinterpret_cast<std::uintptr_t>(mapped);
  }
}

void Executor::begin(Stream compute) {
  communicator_->enter(plan_->name);
  in_call_ = true;
  is_late_ = is_next_late_;
  num_posted_ = num_reached_ = num_waited_ = 0;
  Device& device = communicator_->device();
  is_captured_ = device.is_capturing(compute);
  // Inside a graph the launching stream orders the calls, and outside events mean nothing.
  if (has_released_ && !is_captured_) device.wait(compute, *released_);
}

void Executor::require_call(const char* what) const {
  if (!in_call_) throw std::logic_error(std::string(what) + " outside of a call: begin one first");
}

void Executor::reach(Stream compute) {
  require_call("reach");
  if (num_reached_ != num_posted_) throw std::logic_error("the step before was not posted yet");
  communicator_->device().record(*reached_, compute);
  ++num_reached_;
}

void Executor::post(int step, std::vector<std::uintptr_t> sources, Stream compute) {
  require_call("post");
  if (step != num_posted_ || step >= plan_->num_steps) {
    throw std::logic_error("steps are posted in order: expected step " +
                           std::to_string(num_posted_) + " of " +
                           std::to_string(plan_->num_steps) + ", got " + std::to_string(step));
  }
  if (static_cast<int>(sources.size()) != plan_->num_sources[step]) {
    throw std::logic_error("step " + std::to_string(step) + " sends " +
                           std::to_string(plan_->num_sources[step]) + " tensors, got " +
                           std::to_string(sources.size()));
  }
  if (num_reached_ == num_posted_) reach(compute);
  addresses_.sources = std::move(sources);
  for (int i = plan_->first_group[step]; i < plan_->first_group[step + 1]; ++i) {
    const Group& group = plan_->groups[i];
    tickets_.push_back(
        communicator_->post(plan_, group, addresses_, *reached_, compute, is_captured_, !is_late_));
  }
  ++num_posted_;
}

int Executor::wait(int step, Stream compute) {
  require_call("wait");
  wait_for_groups(plan_->groups_before(step, num_posted_), compute);
  return plan_->steps_done(num_waited_, num_posted_);
}

void Executor::wait_for_groups(int num_groups, Stream compute) {
  if (num_groups > num_waited_) {
    communicator_->device().wait(compute, *tickets_[num_groups - 1]->done);
    num_waited_ = num_groups;
  }
  communicator_->check();
}

void Executor::finish(Stream compute) {
  require_call("finish");
  if (num_posted_ != plan_->num_steps) {
    throw std::logic_error("only " + std::to_string(num_posted_) + " of " +
                           std::to_string(plan_->num_steps) + " steps were posted");
  }
  wait_for_groups(static_cast<int>(tickets_.size()), compute);
  if (!is_captured_) {
    communicator_->device().record(*released_, compute);
    has_released_ = true;
  }
  end_call();
}

void Executor::open_step(int step, std::vector<std::uintptr_t> sources, Stream compute) {
  if (step == 0) begin(compute);
  reach(compute);
  if (is_late_) {
    late_sources_ = std::move(sources);
  } else {
    post(step, std::move(sources), compute);
  }
}

int Executor::close_step(Stream compute) {
  if (is_late_) post(num_posted_, std::move(late_sources_), compute);
  if (num_posted_ < plan_->num_steps) return wait(num_posted_, compute);
  finish(compute);
  return plan_->num_steps;
}

int Executor::num_done(int step) const {
  if (step == plan_->num_steps) return step;
  return plan_->steps_done(plan_->groups_before(step, step), step);
}

void Executor::end_call() {
  for (Ticket* ticket : tickets_) communicator_->give_back(ticket);
  tickets_.clear();
  in_call_ = false;
  communicator_->leave();
}

void Executor::close() {
  if (in_call_) end_call();
  unmap_workspaces();
  if (workspace() == 0) return;
  communicator_->release(reinterpret_cast<void*>(workspace()));
  addresses_.workspace = 0;
}

void Executor::unmap_workspaces() {
  communicator_->drain();
  Transport& transport = communicator_->transport();
  for (std::uintptr_t mapped : addresses_.peer_workspaces) {
    if (mapped != 0) transport.unmap_memory(reinterpret_cast<void*>(mapped));
  }
  addresses_.peer_workspaces.clear();
}

}  // namespace distflash
