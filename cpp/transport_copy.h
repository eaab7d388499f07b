// Transfers as one-sided pulls. Every rank maps the others' workspaces (CUDA IPC); a receiver copies
// out of the source's workspace with the copy engines, so that between GPUs no multiprocessor works
// on it. Stream memory operations on flags, one pair of them per ordered pair of ranks, say when:
//
//   source:    copy what it sends into its workspace; ready := 1 (in the target's memory);
//              wait for taken = 1; taken := 0
//   target:    wait for ready = 1; ready := 0; copy; taken := 1 (in the source's memory)
//
// Each rank waits on its own memory only. Flags return to 0, so a CUDA graph can be replayed. A call
// into the driver costs the host more than what it enqueues, so a group has two batches of flags,
// one before its copies and one behind them, whatever the number of its peers.
//
// A rank that gives up can end its waits only by letting them go, and then it reads and announces
// what is no longer in step. So it first leaves word on the board and lets nothing go before the
// others have given up as well, as their watchdogs do when they see it: by then their workspaces are
// poisoned. What a rank stages that does not look, dead or with nothing in flight, is poisoned by
// those who would read it.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "board.h"
#include "cuda_device.h"
#include "transport.h"

namespace distflash {

// Every rank's contribution in rank order, given one's own; collective.
using Exchange = std::function<std::vector<std::string>(const std::string&)>;

class CopyTransport final : public Transport {
 public:
  CopyTransport(CudaDevice& device, int rank, int num_ranks, const Exchange& exchange);
  ~CopyTransport() override;

  const char* name() const override { return "copy"; }
  void enqueue(const Group& group, const Addresses& addresses, Stream stream,
               const std::function<void()>& record_start) override;
  std::optional<std::string> asynchronous_error() override;
  std::vector<const Transfer*> pending(const Group& group) override;
  void abort(const std::string& reason) override;
  void close(double deadline_s) override;

  bool is_one_sided() const override { return true; }
  std::string export_memory(void* pointer) override;
  void* import_memory(const std::string& handle) override;
  void unmap_memory(void* pointer) override;
  void unmap_peers() override;

 private:
  std::string make_flags();
  bool is_side_stream_idle() const;
  void remember_reading(std::uintptr_t workspace, std::int64_t offset_bytes, std::int64_t num_bytes);
  void poison_what_is_read();
  // In the memory of the rank that waits on it; ``source`` and ``target`` name the transfer's ends.
  CUdeviceptr ready_flag(int source, int target) const;
  CUdeviceptr taken_flag(int source, int target) const;
  std::vector<int> peers(const Group& group, Side side) const;

  CudaDevice& device_;
  const int rank_;
  const int num_ranks_;
  Board board_;
  std::vector<CUdeviceptr> flags_;  // [num_ranks]: each rank's 2 * num_ranks words
  std::mutex mutex_;                // guards what follows
  // Of each mapped workspace: how many bytes are read at which offset.
  std::map<std::uintptr_t, std::map<std::int64_t, std::int64_t>> read_;
};

}  // namespace distflash
