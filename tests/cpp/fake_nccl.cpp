// A stand-in for libnccl.so.2 with what cpp/transport_nccl.cpp asks for. It moves nothing; a
// communicator ends, also by an abort, only when no CUDA graph holds its operations, as NCCL's do.
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <thread>

std::atomic<int> fake_num_graphs = 0, fake_num_finalized = 0, fake_num_aborted = 0;

namespace {

void await_graphs() {
  while (fake_num_graphs != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = 22800;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = {};
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int, ncclUniqueId, int,
                                    ncclConfig_t*) {
  *communicator = reinterpret_cast<ncclComm_t>(1);
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  await_graphs();
  ++fake_num_finalized;
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommAbort(ncclComm_t) {
  ++fake_num_aborted;
  await_graphs();
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclSuccess;
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) { return "refused by the stand-in"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }

}  // extern "C"
