#pragma once

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
}

namespace smp::late {

/// Returns a group for tensors of the late device whose operations run on its
/// streams, by those of a group of Gloo that nothing else uses. It orders
/// streams and keeps tensors as c10d's group of NCCL does (torch 2.11).
c10::intrusive_ptr<c10d::Backend> new_process_group(
    c10::intrusive_ptr<c10d::Backend> gloo);

}  // namespace smp::late
