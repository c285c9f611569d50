#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bind_rooms.h"
#include "csrc/common/check.h"

namespace py = pybind11;

namespace {

PyObject* peer_failure_type = nullptr;  // owned by the module, lives as long

// Translates C++ exceptions into Python ones; no other code does.
void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const smp::ValueError& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const smp::InternalError& e) {
    PyErr_SetString(PyExc_AssertionError, e.what());
  } catch (const smp::PeerFailure& e) {
    PyErr_SetString(peer_failure_type, e.what());
  } catch (const smp::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  } catch (python_error& e) {
    e.restore();  // raised by Python code that autograd ran
  } catch (const c10::Error& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what_without_backtrace());
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ core of smp; the public names are in the package `smp`.";
  peer_failure_type =
      PyErr_NewExceptionWithDoc("smp._C.PeerFailure",
                                "Another rank raised, exited or died. The text "
                                "names the rank, the place and the reason.",
                                PyExc_RuntimeError, nullptr);
  if (peer_failure_type == nullptr) throw py::error_already_set();
  m.add_object("PeerFailure", peer_failure_type);
  py::register_local_exception_translator(&translate);
  smp::bindings::bind_rooms(m);
}
