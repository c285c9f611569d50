#pragma once

#include <utility>

/// Features that not all releases of torch from 2.6 on have. Each is tested on
/// the class itself while its user is compiled, so this file neither contains
/// numbers of releases nor includes torch. The Python face has
/// smp/_torch_releases.py.
namespace smp {

/// Aborts the operations that a backend of c10d has on its way.
/// @return false: before 2.7 only the class of NCCL has it, whose header needs
///     that of NCCL
template <typename Backend>
bool abort_if_offered(Backend& backend) {
  if constexpr (requires { backend.abort(); }) {
    backend.abort();
    return true;
  } else {
    return false;
  }
}

/// Ends a backend of c10d after its last operation, where the base class can
/// (from 2.7 on); elsewhere it ends with its destructor.
template <typename Backend>
void shut_down_if_offered(Backend& backend) {
  if constexpr (requires { backend.shutdown(); }) backend.shutdown();
}

/// True if a stream returns the handle by which the runtime of its device
/// identifies it: 2.11 does, 2.6 does not.
template <typename Stream>
constexpr bool kTellsHandle =
    requires(const Stream& stream) { stream.native_handle(); };

/// Returns `from_handle(stream's handle)` where streams return it,
/// `otherwise()` elsewhere.
template <typename Stream, typename FromHandle, typename Otherwise>
auto by_handle(const Stream& stream, FromHandle&& from_handle,
               Otherwise&& otherwise) {
  if constexpr (kTellsHandle<Stream>) {
    return std::forward<FromHandle>(from_handle)(stream.native_handle());
  } else {
    return std::forward<Otherwise>(otherwise)();
  }
}

/// Makes an owner of a new object. Nodes of autograd have shared pointers in
/// 2.11 and intrusive ones in 2.15.
template <typename Owner, typename Object>
Owner own_new(Object* object) {
  if constexpr (requires { Owner::unsafe_steal_from_new(object); }) {
    return Owner::unsafe_steal_from_new(object);
  } else {
    return Owner(object);
  }
}

/// Makes a further owner of an object that has one already.
template <typename Owner, typename Object>
Owner owner_of(Object& object) {
  if constexpr (requires { Owner::reclaim_copy(&object); }) {
    return Owner::reclaim_copy(&object);
  } else {
    return object.shared_from_this();
  }
}

}  // namespace smp
