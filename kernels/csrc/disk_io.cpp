// Python module of the disk queue: io_uring and thread backends, and their requests.
//
// Memory is passed as addresses and lengths; disk_io.py keeps tensors alive until their requests are done, and checks
// that a process uses only queues that it opened itself.

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>

#include "disk_request.h"
#include "disk_ring.h"
#include "disk_threads.h"

namespace py = pybind11;

namespace {

#ifndef BOOSTER_HAS_IO_URING
// Placeholder if the module was compiled without io_uring.
class RingQueue {
  public:
    RingQueue() { throw std::system_error(ENOSYS, std::generic_category(), "compiled without io_uring"); }
    void submit(const std::shared_ptr<booster::Request>&) {}
    void close() {}
};
#else
using booster::RingQueue;
#endif

// A queue and the process that it belongs to. In a forked process its threads do not exist and locks may be held
// forever, so the queue is leaked there.
template <typename Queue>
class Owned {
  public:
    template <typename... Arguments>
    explicit Owned(Arguments... arguments) : queue_(new Queue(arguments...)), process_(getpid()) {}
    ~Owned() {
        if (process_ != getpid()) {
            queue_.release();
        }
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;

    std::shared_ptr<booster::Request> submit(bool is_write, int descriptor, std::uintptr_t address,
                                             std::size_t num_bytes, std::int64_t offset) {
        auto request = std::make_shared<booster::Request>(is_write, descriptor, address, num_bytes, offset);
        if (request->has_work()) {
            queue_->submit(request);
        } else {
            request->finish();
        }
        return request;
    }

    void close() { queue_->close(); }

  private:
    std::unique_ptr<Queue> queue_;
    pid_t process_;
};

template <typename Queue, typename... Arguments>
void bind_queue(py::module_& module, const char* name) {
    using Bound = Owned<Queue>;
    const py::call_guard<py::gil_scoped_release> unlocked;
    py::class_<Bound>(module, name)
        .def(py::init<Arguments...>(), unlocked)
        .def("submit", &Bound::submit, py::arg("is_write"), py::arg("descriptor"), py::arg("address"),
             py::arg("num_bytes"), py::arg("offset"), unlocked)
        .def("close", &Bound::close, unlocked);
}

void raise_os_error(std::exception_ptr error) {
    try {
        if (error) {
            std::rethrow_exception(error);
        }
    } catch (const std::system_error& system) {
        const py::object value = py::reinterpret_steal<py::object>(
            PyObject_CallFunction(PyExc_OSError, "is", system.code().value(), system.what()));
        if (value) {
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
        }
    }
}

}  // namespace

PYBIND11_MODULE(disk_io_native, module) {
    py::register_local_exception_translator(raise_os_error);
    py::class_<booster::Request, std::shared_ptr<booster::Request>>(module, "Request")
        .def("wait", &booster::Request::wait, py::arg("seconds"), py::call_guard<py::gil_scoped_release>())
        .def("done", &booster::Request::done)
        .def("result",
             [](const booster::Request& request) { return std::make_pair(request.code(), request.num_done()); });
    bind_queue<booster::ThreadedQueue, int>(module, "ThreadedQueue");
    bind_queue<RingQueue>(module, "RingQueue");
}
