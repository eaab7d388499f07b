// Tests of how an NCCL communicator ends, on a stand-in for NCCL (fake_nccl.cpp): with transfers in
// CUDA graphs that outlive it, and without.
#include <atomic>
#include <chrono>
#include <cstdio>

#include "../../cpp/communicator.h"
#include "../../cpp/host_device.h"
#include "../../cpp/transport_nccl.h"
#include "check.h"

using namespace distflash;

extern std::atomic<int> fake_num_graphs, fake_num_finalized, fake_num_aborted;

namespace {

// A rank that received something, in a call that was captured or not.
std::unique_ptr<Communicator> communicator_after_a_call(bool is_captured) {
  auto device = std::make_unique<HostDevice>();
  auto transport = std::make_unique<NcclTransport>(*device, nccl_unique_id(), 0, 2, NcclOptions{}, 5);
  auto ours = std::make_unique<Communicator>(0, 2, 60, std::move(device), std::move(transport));
  const auto plan = std::make_shared<const RankPlan>(make_rank_plan(
      "test", 0, 2, 1, 8, {{0, 1, Side::receive, 1, "bytes", {{8, 0, 0}}}}));
  const auto reached = ours->device().create_event();
  ours->device().record(*reached, 0);
  ours->give_back(ours->post(plan, plan->groups[0], Addresses{}, *reached, 0, is_captured, false));
  return ours;
}

void test_the_orderly_way() {
  communicator_after_a_call(false)->close(1);
  CHECK(fake_num_finalized == 1 && fake_num_aborted == 0);
}

void test_closing_does_not_wait_for_graphs() {
  fake_num_graphs = 1;
  communicator_after_a_call(true)->close(1);
  CHECK(fake_num_finalized == 1 && fake_num_aborted == 0);
  fake_num_graphs = 0;
}

void test_an_abort_does_not_wait_for_graphs() {
  fake_num_graphs = 1;
  auto ours = communicator_after_a_call(true);
  ours->fail("the peer is gone");
  ours->close(1);
  while (fake_num_aborted == 0) std::this_thread::yield();
  ours.reset();
  CHECK(fake_num_finalized == 1 && fake_num_aborted == 1);
  fake_num_graphs = 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // the abort's thread ends
}

}  // namespace

int main() {
  test_the_orderly_way();
  test_closing_does_not_wait_for_graphs();
  test_an_abort_does_not_wait_for_graphs();
  std::printf("ok\n");
}
