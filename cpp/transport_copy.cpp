#include "transport_copy.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace distflash {

namespace {

constexpr std::size_t flag_bytes = 4;
constexpr double release_limit_s = 10;
// How long a rank that gives up waits for the others to do so. Those that have nothing in flight
// look only when they start their next call.
constexpr double agree_limit_s = 1;
constexpr std::size_t max_operations = 128;  // the driver takes fewer than 256 at once
constexpr std::int64_t max_gap_bytes = 256;  // the alignment of runtime/flat.py

// Writes to flags and waits for them, enqueued by one call.
class FlagBatch {
 public:
  // Behind all that the stream did before, for all who can see the memory.
  void write(CUdeviceptr flag, unsigned value) {
    CUstreamBatchMemOpParams& operation = add(CU_STREAM_MEM_OP_WRITE_VALUE_32);
    operation.writeValue.address = flag;
    operation.writeValue.value = value;
    operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }
  void await(CUdeviceptr flag) {
    CUstreamBatchMemOpParams& operation = add(CU_STREAM_MEM_OP_WAIT_VALUE_32);
    operation.waitValue.address = flag;
    operation.waitValue.value = 1;
    operation.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    write(flag, 0);
  }
  void enqueue(CUstream stream) {
    for (std::size_t first = 0; first < operations_.size(); first += max_operations) {
      const std::size_t count = std::min(max_operations, operations_.size() - first);
      DISTFLASH_CUDA(cuStreamBatchMemOp, stream, static_cast<unsigned>(count),
                     operations_.data() + first, 0);
    }
  }

 private:
  CUstreamBatchMemOpParams& add(CUstreamBatchMemOpType type) {
    operations_.emplace_back();
    std::memset(&operations_.back(), 0, sizeof(CUstreamBatchMemOpParams));
    operations_.back().operation = type;
    return operations_.back();
  }

  std::vector<CUstreamBatchMemOpParams> operations_;
};

struct Stretch {
  std::int64_t source_offset_bytes;
  std::int64_t workspace_offset_bytes;
  std::int64_t num_bytes;
};

// Parts lie one behind the other at both ends, most often with the same small gaps for alignment:
// then one copy takes them all, gaps included.
std::vector<Stretch> stretches(const std::vector<Part>& parts) {
  std::vector<Stretch> found;
  for (const Part& part : parts) {
    if (!found.empty()) {
      Stretch& last = found.back();
      const auto source_step = part.source_offset_bytes - last.source_offset_bytes;
      const auto target_step = part.workspace_offset_bytes - last.workspace_offset_bytes;
      const auto gap_bytes = source_step - last.num_bytes;
      if (source_step == target_step && 0 <= gap_bytes && gap_bytes < max_gap_bytes) {
        last.num_bytes = source_step + part.num_bytes;
        continue;
      }
    }
    found.push_back({part.source_offset_bytes, part.workspace_offset_bytes, part.num_bytes});
  }
  return found;
}

}  // namespace

CopyTransport::CopyTransport(CudaDevice& device, int rank, int num_ranks, const Exchange& exchange)
    : device_(device), rank_(rank), num_ranks_(num_ranks), flags_(num_ranks, 0) {
  std::string handle;
  try {
    handle = make_flags() + board_.handle();
  } catch (...) {
    exchange("");  // the others must not wait for this rank
    throw;
  }
  const std::vector<std::string> handles = exchange(handle);
  if (static_cast<int>(handles.size()) != num_ranks) {
    throw std::runtime_error("one handle per rank is needed");
  }
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (peer == rank) continue;
    if (handles[peer].size() <= CU_IPC_HANDLE_SIZE) {
      throw std::runtime_error("rank " + std::to_string(peer) + " cannot share memory");
    }
    flags_[peer] = device_pointer(import_memory(handles[peer].substr(0, CU_IPC_HANDLE_SIZE)));
    board_.add(peer, handles[peer].substr(CU_IPC_HANDLE_SIZE));
  }
}

std::string CopyTransport::make_flags() {
  void* own = device_.allocate(device_.granularity_bytes());
  flags_[rank_] = device_pointer(own);
  const std::size_t num_words = 2 * static_cast<std::size_t>(num_ranks_);
  DISTFLASH_CUDA(cuMemsetD32Async, flags_[rank_], 0, num_words, device_.rescue_stream());
  if (!is_idle_within(device_.rescue_stream(), release_limit_s)) {
    throw std::runtime_error("the GPU did not clear the flags of the copy transport");
  }
  return export_memory(own);
}

CopyTransport::~CopyTransport() { close(0); }

CUdeviceptr CopyTransport::ready_flag(int source, int target) const {
  return flags_[target] + flag_bytes * source;
}

CUdeviceptr CopyTransport::taken_flag(int source, int target) const {
  return flags_[source] + flag_bytes * (num_ranks_ + target);
}

std::vector<int> CopyTransport::peers(const Group& group, Side side) const {
  std::vector<int> found;
  for (const Transfer& transfer : group.transfers) {
    const bool is_new = std::find(found.begin(), found.end(), transfer.peer) == found.end();
    if (transfer.side == side && is_new) found.push_back(transfer.peer);
  }
  return found;
}

void CopyTransport::enqueue(const Group& group, const Addresses& addresses, Stream stream,
                            const std::function<void()>& record_start) {
  const CUstream side = cuda_stream(stream);
  auto copy = [&](const char* from, char* to, std::int64_t num_bytes) {
    DISTFLASH_CUDA(cuMemcpyAsync, device_pointer(to), device_pointer(from),
                   static_cast<std::size_t>(num_bytes), side);
  };
  for (const Transfer& transfer : group.transfers) {
    if (transfer.side == Side::receive) continue;
    for (std::size_t i = 0; i < transfer.parts.size(); ++i) {
      const Part& part = transfer.parts[i];
      copy(addresses.local(transfer, i), addresses.in_workspace(part), part.num_bytes);
    }
  }
  const std::vector<int> targets = peers(group, Side::send);
  const std::vector<int> sources = peers(group, Side::receive);
  FlagBatch before, after;
  for (int target : targets) before.write(ready_flag(rank_, target), 1);
  for (int source : sources) before.await(ready_flag(source, rank_));
  before.enqueue(side);
  record_start();
  for (const Transfer& transfer : group.transfers) {
    if (transfer.side == Side::send) continue;
    const auto theirs = addresses.peer_workspaces[transfer.peer];
    for (const Stretch& stretch : stretches(transfer.parts)) {
      remember_reading(theirs, stretch.source_offset_bytes, stretch.num_bytes);
      const auto from = theirs + stretch.source_offset_bytes;
      const auto to = addresses.workspace + stretch.workspace_offset_bytes;
      copy(reinterpret_cast<const char*>(from), reinterpret_cast<char*>(to), stretch.num_bytes);
    }
  }
  for (int source : sources) after.write(taken_flag(source, rank_), 1);
  for (int target : targets) after.await(taken_flag(rank_, target));
  after.enqueue(side);
}

std::vector<const Transfer*> CopyTransport::pending(const Group& group) {
  std::vector<const Transfer*> all;
  for (const Transfer& transfer : group.transfers) all.push_back(&transfer);
  return all;
}

std::optional<std::string> CopyTransport::asynchronous_error() {
  const std::optional<std::string> reason = board_.read();
  if (!reason) return std::nullopt;
  return "the group was ended: " + *reason;
}

bool CopyTransport::is_side_stream_idle() const {
  const CUstream side = cuda_stream(device_.side_stream());
  return CudaDriver::get().cuStreamQuery(side) != CUDA_ERROR_NOT_READY;
}

void CopyTransport::remember_reading(std::uintptr_t workspace, std::int64_t offset_bytes,
                                     std::int64_t num_bytes) {
  std::lock_guard lock(mutex_);
  std::int64_t& known_bytes = read_[workspace][offset_bytes];
  known_bytes = std::max(known_bytes, num_bytes);
}

// With what is not a number in any dtype, as ``CudaDevice::poison``.
void CopyTransport::poison_what_is_read() {
  const CUstream rescue = device_.rescue_stream();
  std::lock_guard lock(mutex_);  // what is found in ``read_`` stays mapped meanwhile
  for (const auto& [workspace, stretches] : read_) {
    for (const auto& [offset_bytes, num_bytes] : stretches) {
      CudaDriver::get().cuMemsetD8Async(workspace + offset_bytes, 0xFF, num_bytes, rescue);
    }
  }
  is_idle_within(rescue, agree_limit_s);
}

void CopyTransport::abort(const std::string& reason) {
  const auto begun = std::chrono::steady_clock::now();
  const auto passed_s = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  };
  const auto a_moment = std::chrono::milliseconds(1);
  board_.post(reason);
  while (!is_side_stream_idle() && !board_.have_all_posted() && passed_s() < agree_limit_s) {
    std::this_thread::sleep_for(a_moment);
  }
  if (!is_side_stream_idle()) poison_what_is_read();
  // Stream memory operations know nothing of aborts: let every wait go by writing what it waits
  // for, again and again, since each of them resets its flag for the next.
  const std::size_t num_words = 2 * static_cast<std::size_t>(num_ranks_);
  const CUstream rescue = device_.rescue_stream();
  while (!is_side_stream_idle() && passed_s() < release_limit_s) {
    CudaDriver::get().cuMemsetD32Async(flags_[rank_], 1, num_words, rescue);
    is_idle_within(rescue, 1);
    std::this_thread::sleep_for(a_moment);
  }
}

void CopyTransport::unmap_peers() {
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == rank_ || flags_[peer] == 0) continue;
    unmap_memory(reinterpret_cast<void*>(flags_[peer]));
    flags_[peer] = 0;
  }
}

void CopyTransport::close(double) {
  unmap_peers();
  if (flags_[rank_] != 0) device_.release(reinterpret_cast<void*>(flags_[rank_]));
  flags_[rank_] = 0;
}

std::string CopyTransport::export_memory(void* pointer) {
  CUipcMemHandle handle;
  DISTFLASH_CUDA(cuIpcGetMemHandle, &handle, device_pointer(pointer));
  return std::string(handle.reserved, sizeof(handle.reserved));
}

void* CopyTransport::import_memory(const std::string& handle) {
  CUipcMemHandle imported;
  if (handle.size() != sizeof(imported.reserved)) throw std::invalid_argument("no memory handle");
  std::memcpy(imported.reserved, handle.data(), handle.size());
  CUdeviceptr pointer = 0;
  DISTFLASH_CUDA(cuIpcOpenMemHandle, &pointer, imported, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  return reinterpret_cast<void*>(pointer);
}

void CopyTransport::unmap_memory(void* pointer) {
  {
    std::lock_guard lock(mutex_);
    read_.erase(reinterpret_cast<std::uintptr_t>(pointer));
  }
  // Without the lock: the driver may wait for what is enqueued, and an abort, which lets that go,
  // takes the lock.
  CudaDriver::get().cuIpcCloseMemHandle(device_pointer(pointer));  // the peer may be gone
}

}  // namespace distflash
