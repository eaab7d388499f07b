// One rank's side of a plan, flat: what its transfers need, and nothing else.
//
// The words are those of megatron_distflash/plan: a plan has steps, a step has transfers. Those that
// a rank posts in one step form groups by the step that needs them, the most urgent first, so that
// nothing waits for bytes that may still take their time.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace distflash {

// One contiguous tensor of a transfer. Received tensors land in the workspace, one allocation that
// holds every slot of the plan. Sent tensors are the caller's, except that a one-sided transport
// copies them into the workspace first, where peers can reach them.
struct Part {
  std::int64_t num_bytes;
  std::int64_t workspace_offset_bytes;  // where it lands or is staged here; -1: it is not staged
  std::int64_t source_offset_bytes;     // received: where the source's workspace stages it
};

enum class Side { send, receive };

struct Transfer {
  int step;
  int needed;  // the first step in which its target reads it
  Side side;
  int peer;
  std::string name;  // for messages: payload, tokens, heads and both ranks
  std::vector<Part> parts;
  int first_source = 0;  // sent: the first part's place among the pointers given to the post

  std::int64_t num_bytes() const {
    std::int64_t total = 0;
    for (const Part& part : parts) total += part.num_bytes;
    return total;
  }
};

struct Group {
  int step;
  int needed;
  std::vector<Transfer> transfers;  // in the order both sides agree on

  bool has_receives() const {
    for (const Transfer& transfer : transfers) {
      if (transfer.side == Side::receive) return true;
    }
    return false;
  }
};

struct RankPlan {
  std::string name;  // for messages: "balanced forward"
  int rank;
  int num_ranks;
  int num_steps;
  std::int64_t workspace_bytes;
  std::vector<Group> groups;     // by step, then by need
  std::vector<int> first_group;  // [num_steps + 1], where each step's groups begin
  std::vector<int> num_sources;  // [num_steps], pointers that the step's post takes

  // How many groups have to end before ``step`` may read what arrived for it, of those that the
  // first ``num_posted`` steps posted. Groups end in order, so the last one that matters stands for
  // all before it.
  int groups_before(int step, int num_posted) const {
    int last = first_group[num_posted];
    while (last > 0 && !(groups[last - 1].needed <= step && groups[last - 1].has_receives())) --last;
    return last;
  }
  // How many of the first ``num_posted`` steps are done with what they sent once the first
  // ``num_groups`` groups have ended.
  int steps_done(int num_groups, int num_posted) const {
    int num_done = 0;
    while (num_done < num_posted && first_group[num_done + 1] <= num_groups) ++num_done;
    return num_done;
  }
};

// Sorts the transfers into groups. Throws std::invalid_argument for what cannot be executed.
inline RankPlan make_rank_plan(std::string name, int rank, int num_ranks, int num_steps,
                               std::int64_t workspace_bytes, std::vector<Transfer> transfers) {
  if (num_steps < 0 || workspace_bytes < 0) throw std::invalid_argument("negative plan sizes");
  const auto size = static_cast<std::size_t>(num_steps);
  RankPlan plan{std::move(name),
                rank,
                num_ranks,
                num_steps,
                workspace_bytes,
                {},
                {},
                std::vector<int>(size, 0)};
  std::map<std::pair<int, int>, std::vector<Transfer>> groups;
  auto require = [](bool holds, const Transfer& transfer, const char* what) {
    if (!holds) throw std::invalid_argument(transfer.name + ": " + what);
  };
  for (Transfer& transfer : transfers) {
    require(0 <= transfer.step && transfer.step < num_steps, transfer, "its step does not exist");
    require(transfer.needed > transfer.step, transfer, "it is needed before it can be there");
    require(0 <= transfer.peer && transfer.peer < num_ranks && transfer.peer != rank, transfer,
            "its peer is not another rank of the group");
    require(!transfer.parts.empty(), transfer, "it moves nothing");
    for (const Part& part : transfer.parts) {
      require(part.num_bytes > 0, transfer, "it has an empty part");
      if (transfer.side == Side::send && part.workspace_offset_bytes == -1) continue;
      require(part.workspace_offset_bytes >= 0 &&
                  part.workspace_offset_bytes + part.num_bytes <= workspace_bytes,
              transfer, "it does not lie inside the workspace");
    }
    if (transfer.side == Side::send) {
      transfer.first_source = plan.num_sources[transfer.step];
      plan.num_sources[transfer.step] += static_cast<int>(transfer.parts.size());
    }
    groups[{transfer.step, transfer.needed}].push_back(std::move(transfer));
  }
  for (auto& [when, members] : groups) {
    while (static_cast<int>(plan.first_group.size()) <= when.first) {
      plan.first_group.push_back(static_cast<int>(plan.groups.size()));
    }
    plan.groups.push_back({when.first, when.second, std::move(members)});
  }
  plan.first_group.resize(size + 1, static_cast<int>(plan.groups.size()));
  return plan;
}

}  // namespace distflash
