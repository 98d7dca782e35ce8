// The Python module: devices, reports, and the backend as torch's class ProcessGroupNCCL.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "device.h"
#include "order.h"
#include "pinned.h"
#include "report.h"
#include "simccl.h"

namespace py = pybind11;

namespace simulated {
namespace {

py::object* on_report = nullptr;  // never destroyed: reports may come from destructors at the end of the process
py::object* where = nullptr;
bool traces_places = false;

}  // namespace

void report(const std::string& kind, const std::string& text) {
  if (on_report == nullptr || !Py_IsInitialized()) return;
  py::gil_scoped_acquire interpreter;
  try {
    (*on_report)(kind, text);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("a report of the simulated device");
  }
}

std::string place() {
  if (where == nullptr || !Py_IsInitialized()) return "";
  py::gil_scoped_acquire interpreter;
  return (*where)().cast<std::string>();
}

std::string place_if_traced() { return traces_places ? place() : ""; }

void without_interpreter(const std::function<void()>& function) {
  if (!PyGILState_Check()) return function();
  py::gil_scoped_release released;
  function();
}

}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;

  module.def("start", [](int count, py::object reported, py::object placed) {
    num_devices = count;
    on_report = new py::object(std::move(reported));
    where = new py::object(std::move(placed));
  });
  module.def("set_options", [](bool checks, bool drops_waits, bool places) {
    checks_order = checks;
    drops_avoidable_waits = drops_waits;
    traces_places = places;
  });
  module.def("settle", [] {
    settle_pinned_copies();
    settle_order();
  });
  module.def("num_devices", [] { return num_devices; });
  module.def("current_device", [] { return int(current_device()); });
  module.def("set_current_device", [](int device) { set_current_device(c10::DeviceIndex(device)); });
  module.def("default_generator", [](int device) { return default_generator(c10::DeviceIndex(device)); });
  module.def("bytes_in_use", [](int device) { return bytes_in_use(c10::DeviceIndex(device)); });
  module.def("total_bytes", &total_bytes);
  module.def("resize_storage", [](const at::Tensor& tensor, size_t num_bytes) {
    resize_storage(tensor.storage(), num_bytes);
  });

  auto distributed = py::module_::import("torch._C._distributed_c10d");
  py::class_<Simccl, c10d::Backend, c10::intrusive_ptr<Simccl>> backend(module, "ProcessGroupNCCL");
  py::class_<Simccl::Options, c10d::Backend::Options, c10::intrusive_ptr<Simccl::Options>>(backend, "Options")
      .def(py::init([](bool is_high_priority_stream) {
             auto options = c10::make_intrusive<Simccl::Options>();
             options->is_high_priority_stream = is_high_priority_stream;
             return options;
           }),
           py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Simccl::Options::is_high_priority_stream)
      .def_readwrite("split_from", &Simccl::Options::split_from)
      .def_readwrite("split_color", &Simccl::Options::split_color)
      .def("__deepcopy__", [](const Simccl::Options& self, py::dict) {
        auto copy = c10::make_intrusive<Simccl::Options>();
        copy->timeout = self.timeout;
        copy->group_name = self.group_name;
        copy->global_ranks_in_group = self.global_ranks_in_group;
        return copy;
      });
  backend.def_property_readonly("options", [](Simccl& self) { return self.options(); })
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<Simccl::Options> options) {
        return c10::make_intrusive<Simccl>(store, rank, size, std::move(options));
      }))
      .def("_set_default_timeout", &Simccl::setTimeout)
      .def("perform_nocolor_split", [](Simccl& self, py::object) { self.split_without_part(); })
      .def("comm_split_count", &Simccl::num_splits)
      .def("_group_start", [](Simccl&) {})
      .def("_group_end", [](Simccl&) {})
      .def("_is_initialized", [](Simccl&) { return true; });
}
