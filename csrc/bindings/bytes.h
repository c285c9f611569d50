#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

namespace smp::bindings {

/// A view of the content of a `bytes` argument; valid during the call. A plain
/// std::string would take `str` as well, and stubs would name that.
struct Bytes {
  std::string_view view;

  std::string copy() const { return std::string(view); }
};

}  // namespace smp::bindings

namespace pybind11::detail {

template <>
struct type_caster<smp::bindings::Bytes> {
  PYBIND11_TYPE_CASTER(smp::bindings::Bytes, const_name("bytes"));

  bool load(handle source, bool /*may_convert*/) {
    if (!PyBytes_Check(source.ptr())) return false;
    value.view = {PyBytes_AS_STRING(source.ptr()),
                  static_cast<size_t>(PyBytes_GET_SIZE(source.ptr()))};
    return true;
  }
};

}  // namespace pybind11::detail
