// Transfers as NCCL point-to-point groups, on a communicator of our own in the NCCL library that the
// process has loaded already (torch's).
#pragma once

#include <nccl.h>

#include <mutex>
#include <string>
#include <vector>

#include "transport.h"

namespace distflash {

struct NcclOptions {
  // Send and receive occupy one multiprocessor per CTA, which attention then lacks.
  int max_ctas = 2;
  // Clusters of CTAs need neighbouring multiprocessors to be free at once; 0: no clusters.
  int cga_cluster_size = 0;
  // Blocking calls cost the host a fraction of the others' time (NCCL makes a thread for each group
  // of those). A call that is stuck is let go by the watchdog's abort.
  bool is_blocking = true;
};

// "2.28.9". Throws std::runtime_error if the process has no NCCL, or one that lacks a function.
std::string nccl_version();
// To be made by rank 0 and given to all.
std::string nccl_unique_id();

class NcclTransport final : public Transport {
 public:
  // Every rank calls this at the same time. Throws std::runtime_error if they are not all there
  // within the deadline.
  NcclTransport(Device& device, const std::string& unique_id, int rank, int num_ranks,
                const NcclOptions& options, double deadline_s);
  ~NcclTransport() override;

  const char* name() const override { return "nccl"; }
  void enqueue(const Group& group, const Addresses& addresses, Stream stream,
               const std::function<void()>& record_start) override;
  void note_capture() override;
  std::optional<std::string> asynchronous_error() override;
  // NCCL runs a group as one kernel and does not say how far it is.
  std::vector<const Transfer*> pending(const Group& group) override;
  void abort(const std::string& reason) override;
  void close(double deadline_s) override;

 private:
  void settle(ncclResult_t result, const char* what, double deadline_s);

  const double deadline_s_;
  // One thread at a time inside NCCL. Timed: an abort must get through to a thread that is stuck.
  std::timed_mutex mutex_;
  ncclComm_t communicator_ = nullptr;
  bool is_aborted_ = false;
  bool is_captured_ = false;  // CUDA graphs may hold operations of the communicator
};

}  // namespace distflash
