// Python's view of the module: conversions and nothing else. Pointers and streams are integers, the
// GIL is free during every call, CommunicationError becomes a Python exception.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "executor.h"
#include "tape.h"
#include "transport_host.h"
#ifdef DISTFLASH_WITH_CUDA
#include "transport_copy.h"
#include "transport_nccl.h"
#endif

namespace py = pybind11;
using namespace distflash;

namespace {

// (step, needed, is send, peer, name, parts), a part as in plan.h
using FlatTransfer =
    std::tuple<int, int, bool, int, std::string, std::vector<std::array<std::int64_t, 3>>>;

std::shared_ptr<Executor> make_executor(std::shared_ptr<Communicator> communicator,
                                        std::string name, int num_steps,
                                        std::int64_t workspace_bytes,
                                        const std::vector<FlatTransfer>& flat) {
  std::vector<Transfer> transfers;
  for (const auto& [step, needed, is_send, peer, label, flat_parts] : flat) {
    std::vector<Part> parts;
    for (const auto& part : flat_parts) parts.push_back({part[0], part[1], part[2]});
    const Side side = is_send ? Side::send : Side::receive;
    transfers.push_back({step, needed, side, peer, label, parts});
  }
  RankPlan plan = make_rank_plan(std::move(name), communicator->rank(), communicator->num_ranks(),
                                 num_steps, workspace_bytes, std::move(transfers));
  return std::make_shared<Executor>(std::move(communicator), std::move(plan));
}

// (kind, words, (word, buffer, offset) of its pointers, numbers, settings), as in tape.h
using FlatNote =
    std::tuple<std::string, std::vector<std::uint64_t>,
               std::vector<std::tuple<int, int, std::int64_t>>, std::vector<std::int64_t>, py::bytes>;

std::unique_ptr<Tape> make_tape(std::shared_ptr<Executor> executor,
                                const std::map<std::string, std::uintptr_t>& functions,
                                int num_buffers, const std::vector<FlatNote>& flat) {
  Kernels kernels;
  auto take = [&](auto& function, const char* name) {
    const auto found = functions.find(name);
    if (found == functions.end()) return;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found->second);
  };
  take(kernels.forward, "forward");
  take(kernels.backward, "backward");
  take(kernels.merge, "merge");
  take(kernels.finish, "finish");
  take(kernels.delta, "delta");
  take(kernels.accumulate, "accumulate");
  take(kernels.cast, "cast");
  std::vector<Note> notes;
  for (const auto& [kind, words, flat_pointers, numbers, settings] : flat) {
    std::vector<Pointer> pointers;
    for (const auto& [word, buffer, offset] : flat_pointers) {
      pointers.push_back({word, buffer, offset});
    }
    notes.push_back({kind, words, pointers, numbers, std::string(settings)});
  }
  return std::make_unique<Tape>(std::move(executor), kernels, num_buffers, std::move(notes));
}

std::shared_ptr<Communicator> make_host(std::shared_ptr<HostHub> hub, int rank, double deadline_s) {
  auto transport = std::make_unique<HostTransport>(hub, rank);
  return std::make_shared<Communicator>(rank, hub->num_ranks(), deadline_s,
                                        std::make_unique<HostDevice>(), std::move(transport));
}

#ifdef DISTFLASH_WITH_CUDA
Hold hold_of(const std::string& word) {
  if (word == "never") return Hold::never;
  if (word == "first") return Hold::first;
  if (word == "always") return Hold::always;
  throw std::invalid_argument("hold must be never, first or always, not " + word);
}

std::shared_ptr<Communicator> make_nccl(const std::string& unique_id, int rank, int num_ranks,
                                        double deadline_s, int max_ctas, int cga_cluster_size,
                                        bool is_blocking, const std::string& hold) {
  auto device = std::make_unique<CudaDevice>();
  const NcclOptions options{max_ctas, cga_cluster_size, is_blocking};
  auto transport =
      std::make_unique<NcclTransport>(*device, unique_id, rank, num_ranks, options, deadline_s);
  return std::make_shared<Communicator>(rank, num_ranks, deadline_s, std::move(device),
                                        std::move(transport), hold_of(hold));
}

// Every rank's handle in rank order, given one's own.
using PyExchange = std::function<std::vector<py::bytes>(py::bytes)>;

std::shared_ptr<Communicator> make_copy(int rank, int num_ranks, double deadline_s,
                                        const std::string& hold, const PyExchange& exchange) {
  std::unique_ptr<CudaDevice> device;
  try {
    device = std::make_unique<CudaDevice>();
  } catch (...) {
    exchange(py::bytes(""));  // the others must not wait for this rank
    throw;
  }
  const Exchange all = [&](const std::string& own) {
    std::vector<std::string> handles;
    for (const py::bytes& handle : exchange(py::bytes(own))) handles.emplace_back(handle);
    return handles;
  };
  auto transport = std::make_unique<CopyTransport>(*device, rank, num_ranks, all);
  return std::make_shared<Communicator>(rank, num_ranks, deadline_s, std::move(device),
                                        std::move(transport), hold_of(hold));
}

void bind_cuda(py::module_& module,
               py::class_<Communicator, std::shared_ptr<Communicator>>& communicator) {
  using no_gil = py::call_guard<py::gil_scoped_release>;
  module.def("nccl_version", &nccl_version);
  module.def("nccl_unique_id", [] { return py::bytes(nccl_unique_id()); });
  communicator
      .def_static("nccl", &make_nccl, no_gil(), py::arg("unique_id"), py::arg("rank"),
                  py::arg("num_ranks"), py::arg("deadline_s"), py::arg("max_ctas"),
                  py::arg("cga_cluster_size"), py::arg("is_blocking"), py::arg("hold"))
      .def_static("copy", &make_copy, py::arg("rank"), py::arg("num_ranks"),
                  py::arg("deadline_s"), py::arg("hold"), py::arg("exchange"));
}
#endif

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "Executes the transfers of a plan on streams of its own; see runtime/native.py.";
  py::register_exception<CommunicationError>(module, "CommunicationError", PyExc_RuntimeError);
  using no_gil = py::call_guard<py::gil_scoped_release>;

  py::class_<HostHub, std::shared_ptr<HostHub>>(module, "HostHub")
      .def(py::init<int, unsigned, int>(), py::arg("num_ranks"), py::arg("seed") = 0,
           py::arg("max_jitter_us") = 0);

  py::class_<Communicator, std::shared_ptr<Communicator>> communicator(module, "Communicator");
  communicator
      .def_static("host", &make_host, py::arg("hub"), py::arg("rank"), py::arg("deadline_s"))
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("num_ranks", &Communicator::num_ranks)
      .def_property_readonly("name", [](Communicator& self) { return self.transport().name(); })
      .def_property_readonly("is_one_sided",
                             [](Communicator& self) { return self.transport().is_one_sided(); })
      .def("memory_reserved_bytes", &Communicator::memory_reserved_bytes)
      .def("check", &Communicator::check, no_gil())
      .def("fail", &Communicator::fail, no_gil(), py::arg("message"))
      .def("unmap_peers", &Communicator::unmap_peers, no_gil())
      .def("close", &Communicator::close, no_gil(), py::arg("patience_s"));

#ifdef DISTFLASH_WITH_CUDA
  bind_cuda(module, communicator);
  module.attr("with_cuda") = true;
#else
  module.attr("with_cuda") = false;
#endif

  py::class_<Executor, std::shared_ptr<Executor>>(module, "Executor")
      .def(py::init(&make_executor), py::arg("communicator"), py::arg("name"),
           py::arg("num_steps"), py::arg("workspace_bytes"), py::arg("transfers"))
      .def_property_readonly("workspace", &Executor::workspace)
      .def("export_workspace", [](Executor& self) { return py::bytes(self.export_workspace()); })
      .def("import_workspaces", &Executor::import_workspaces, no_gil(), py::arg("handles"))
      .def("unmap_workspaces", &Executor::unmap_workspaces, no_gil())
      .def("begin", &Executor::begin, no_gil(), py::arg("stream"))
      .def("reach", &Executor::reach, no_gil(), py::arg("stream"))
      .def("post", &Executor::post, no_gil(), py::arg("step"), py::arg("sources"),
           py::arg("stream"))
      .def("wait", &Executor::wait, no_gil(), py::arg("step"), py::arg("stream"))
      .def("finish", &Executor::finish, no_gil(), py::arg("stream"))
      .def("set_late", &Executor::set_late, py::arg("is_late"))
      .def_property_readonly("is_late", &Executor::is_late)
      .def("open_step", &Executor::open_step, no_gil(), py::arg("step"), py::arg("sources"),
           py::arg("stream"))
      .def("close_step", &Executor::close_step, no_gil(), py::arg("stream"))
      .def("num_done", &Executor::num_done, py::arg("step"))
      .def("close", &Executor::close, no_gil());

  py::class_<Tape>(module, "Tape")
      .def(py::init(&make_tape), py::arg("executor"), py::arg("functions"), py::arg("num_buffers"),
           py::arg("notes"))
      .def("run", &Tape::run, no_gil(), py::arg("buffers"), py::arg("stream"));
}
