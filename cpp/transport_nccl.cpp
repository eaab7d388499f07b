#include "transport_nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <thread>

namespace distflash {

namespace {

#define DISTFLASH_NCCL_FUNCTIONS(use)                                                        \
  use(ncclGetVersion) use(ncclGetUniqueId) use(ncclCommInitRankConfig)                       \
  use(ncclCommGetAsyncError) use(ncclCommFinalize) use(ncclCommDestroy) use(ncclCommAbort)   \
  use(ncclGroupStart) use(ncclGroupEnd) use(ncclSend) use(ncclRecv) use(ncclGetErrorString)  \
  use(ncclGetLastError)

struct Nccl {
#define DISTFLASH_DECLARE(function) decltype(&::function) function;
  DISTFLASH_NCCL_FUNCTIONS(DISTFLASH_DECLARE)
#undef DISTFLASH_DECLARE
};

constexpr std::chrono::seconds abort_patience(2);
constexpr double close_limit_s = 30;
constexpr int config_version = 21700;  // the first NCCL that caps CTAs and cluster sizes

Nccl load_nccl() {
  // NOLOAD: a second NCCL in one process would have its own idea of everything.
  void* library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) {
    throw std::runtime_error("the process has not loaded libnccl.so.2; torch with NCCL is needed");
  }
  Nccl nccl;
#define DISTFLASH_LOAD(function)                                                        \
  nccl.function = reinterpret_cast<decltype(nccl.function)>(dlsym(library, #function)); \
  if (nccl.function == nullptr) throw std::runtime_error("NCCL is too old: it has no " #function);
  DISTFLASH_NCCL_FUNCTIONS(DISTFLASH_LOAD)
#undef DISTFLASH_LOAD
  int version = 0;
  nccl.ncclGetVersion(&version);
  if (version < config_version) {
    throw std::runtime_error("NCCL is too old: 2.17 is needed to cap its share of the GPU");
  }
  return nccl;
}

const Nccl& nccl() {
  static const Nccl functions = load_nccl();
  return functions;
}

std::string describe(ncclResult_t result, ncclComm_t communicator) {
  std::string text = std::string("NCCL: ") + nccl().ncclGetErrorString(result);
  const char* last = nccl().ncclGetLastError(communicator);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

struct Made {
  ncclComm_t communicator;
  ncclResult_t result;
};

// A blocking call returns when all ranks are there, and a communicator cannot be aborted before: so
// a thread of its own makes it, which is left behind if the deadline passes.
Made make_communicator(Device& device, std::function<Made()> make, double deadline_s) {
  struct Promises {
    std::promise<void> attached;
    std::promise<Made> made;
  };
  const auto promises = std::make_shared<Promises>();
  std::future<void> attached = promises->attached.get_future();
  std::future<Made> made = promises->made.get_future();
  std::thread([&device, promises, make = std::move(make)]() {
    try {
      device.attach_thread();
      promises->attached.set_value();
    } catch (...) {
      return promises->attached.set_exception(std::current_exception());
    }
    try {
      promises->made.set_value(make());
    } catch (...) {
      promises->made.set_exception(std::current_exception());
    }
  }).detach();
  attached.get();  // the device may be gone later
  if (made.wait_for(std::chrono::duration<double>(deadline_s)) != std::future_status::ready) {
    throw std::runtime_error(
        "NCCL made no communicator within the deadline; see whether a rank died or is stuck");
  }
  return made.get();
}

}  // namespace

std::string nccl_version() {
  int version = 0;
  nccl().ncclGetVersion(&version);
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::string nccl_unique_id() {
  ncclUniqueId id;
  const ncclResult_t result = nccl().ncclGetUniqueId(&id);
  if (result != ncclSuccess) throw std::runtime_error(describe(result, nullptr));
  return std::string(id.internal, sizeof(id.internal));
}

NcclTransport::NcclTransport(Device& device, const std::string& unique_id, int rank, int num_ranks,
                             const NcclOptions& options, double deadline_s)
    : deadline_s_(deadline_s) {
  ncclUniqueId id;
  if (unique_id.size() != sizeof(id.internal)) throw std::invalid_argument("no NCCL unique id");
  std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = options.is_blocking ? 1 : 0;
  config.maxCTAs = options.max_ctas;
  config.cgaClusterSize = options.cga_cluster_size;
  const auto made = make_communicator(device, [=]() mutable {
    Made made{nullptr, ncclSuccess};
    made.result = nccl().ncclCommInitRankConfig(&made.communicator, num_ranks, id, rank, &config);
    return made;
  }, deadline_s);
  communicator_ = made.communicator;
  try {
    settle(made.result, "ncclCommInitRankConfig", deadline_s);
  } catch (...) {
    abort("the communicator could not be made");
    throw;
  }
}

NcclTransport::~NcclTransport() { abort("the transport is gone"); }

// A communicator that does not block answers "in progress" and goes on in a thread of NCCL's. What
// comes next relies on the kernel being in the stream, so wait; after a pair's first transfer this
// is a matter of microseconds.
void NcclTransport::settle(ncclResult_t result, const char* what, double deadline_s) {
  const auto begun = std::chrono::steady_clock::now();
  while (result == ncclInProgress) {
    const ncclResult_t asked = nccl().ncclCommGetAsyncError(communicator_, &result);
    if (asked != ncclSuccess) result = asked;
    if (result != ncclInProgress) break;
    const double passed_s = seconds_since(begun);
    if (passed_s > deadline_s) {
      throw std::runtime_error(std::string(what) + " did not end within the deadline");
    }
    if (passed_s > 1e-3) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (result != ncclSuccess) {
    throw std::runtime_error(std::string(what) + " failed: " + describe(result, communicator_));
  }
}

void NcclTransport::enqueue(const Group& group, const Addresses& addresses, Stream stream,
                            const std::function<void()>& record_start) {
  std::lock_guard lock(mutex_);
  if (is_aborted_) throw std::runtime_error("the NCCL communicator was aborted");
  const auto cuda_stream = reinterpret_cast<cudaStream_t>(stream);
  record_start();
  ncclResult_t worst = nccl().ncclGroupStart();
  for (const Transfer& transfer : group.transfers) {
    for (std::size_t i = 0; i < transfer.parts.size(); ++i) {
      char* pointer = addresses.local(transfer, i);
      const auto num_bytes = static_cast<std::size_t>(transfer.parts[i].num_bytes);
      const ncclResult_t result =
          transfer.side == Side::send
              ? nccl().ncclSend(pointer, num_bytes, ncclUint8, transfer.peer, communicator_,
                                cuda_stream)
              : nccl().ncclRecv(pointer, num_bytes, ncclUint8, transfer.peer, communicator_,
                                cuda_stream);
      if (result != ncclSuccess && result != ncclInProgress) worst = result;
    }
  }
  const ncclResult_t ended = nccl().ncclGroupEnd();
  settle(worst == ncclSuccess ? ended : worst, "the group of sends and receives", deadline_s_);
}

void NcclTransport::note_capture() {
  std::lock_guard lock(mutex_);
  is_captured_ = true;
}

std::optional<std::string> NcclTransport::asynchronous_error() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || is_aborted_ || communicator_ == nullptr) return std::nullopt;
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = nccl().ncclCommGetAsyncError(communicator_, &state);
  if (asked != ncclSuccess) state = asked;
  if (state == ncclSuccess || state == ncclInProgress) return std::nullopt;
  return describe(state, communicator_);
}

std::vector<const Transfer*> NcclTransport::pending(const Group& group) {
  std::vector<const Transfer*> all;
  for (const Transfer& transfer : group.transfers) all.push_back(&transfer);
  return all;
}

void NcclTransport::abort(const std::string&) {
  // A thread that is stuck inside NCCL holds the mutex; the abort is what lets it go.
  std::unique_lock lock(mutex_, abort_patience);
  if (is_aborted_ || communicator_ == nullptr) return;
  is_aborted_ = true;
  if (is_captured_) {
    // Ends what is enqueued at once, but returns only when no graph is left, see ``close``.
    std::thread([communicator = communicator_] { nccl().ncclCommAbort(communicator); }).detach();
  } else {
    nccl().ncclCommAbort(communicator_);
  }
}

void NcclTransport::close(double deadline_s) {
  {
    std::lock_guard lock(mutex_);
    if (is_aborted_ || communicator_ == nullptr) return;
    if (is_captured_) {
      // NCCL waits, without a limit, for the end of all graphs that hold the communicator's
      // operations. At exit some often outlive it: then it ends with the process.
      communicator_ = nullptr;
      return;
    }
    try {
      const double limit_s = deadline_s < close_limit_s ? deadline_s : close_limit_s;
      settle(nccl().ncclCommFinalize(communicator_), "ncclCommFinalize", limit_s);
      nccl().ncclCommDestroy(communicator_);
      communicator_ = nullptr;
      return;
    } catch (const std::runtime_error&) {
      // A peer that is gone keeps the orderly way from ending; everything of ours has landed.
    }
  }
  abort("closing");
}

}  // namespace distflash
