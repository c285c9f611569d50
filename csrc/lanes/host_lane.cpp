#include "csrc/lanes/host_lane.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "csrc/common/check.h"
#include "csrc/lanes/plain_tensor.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;

at::Tensor page_locked(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, at::TensorOptions(dtype).pinned_memory(true));
}

}  // namespace

HostLane::HostLane(c10::Device device)
    : device_(device), to_host_(device), to_device_(device) {}

std::optional<Posted> HostLane::post(int /*dst*/, const at::Tensor& source,
                                     bool is_stable) {
  const at::AutoGradMode no_grad(false);
  at::Tensor data = own_plain_tensor(source, is_stable);
  Posted posted;
  posted.descriptor.lane = LaneKind::kHost;
  posted.descriptor.num_bytes = static_cast<int64_t>(data.nbytes());
  posted.descriptor.dtype = data.scalar_type();
  posted.descriptor.sizes = data.sizes().vec();
  if (device_.is_cpu()) {
    posted.payload.data = std::move(data);
    return posted;
  }
  at::Tensor host = page_locked(data.sizes(), data.scalar_type());
  posted.payload.mark = to_host_.run(
      Mark::none(), [&] { host.copy_(data, /*non_blocking=*/true); });
  posted.end = posted.payload.mark;
  to_host_.keep(data);
  posted.payload.data = std::move(host);
  return posted;
}

at::Tensor HostLane::new_payload(const Descriptor& descriptor) const {
  return device_.is_cpu() ? at::empty(descriptor.sizes, descriptor.dtype)
                          : page_locked(descriptor.sizes, descriptor.dtype);
}

MarkedTensor HostLane::take(int /*src*/, const Descriptor& descriptor,
                            at::Tensor payload) {
  const at::AutoGradMode no_grad(false);
  if (device_.is_cpu()) return {std::move(payload)};
  MarkedTensor result;
  // Made and filled on one stream; users report their streams to the allocator.
  result.mark = to_device_.run_alone([&] {
    result.data = at::empty(
        descriptor.sizes, at::TensorOptions(descriptor.dtype).device(device_));
    result.data.copy_(payload, /*non_blocking=*/true);
  });
  return result;
}

void HostLane::acknowledge(int src, const Receipt& receipt) {
  SMP_CHECK(false, "global_rank ", src, " gave back slot ", receipt.slot,
            " of the host lane, which has none");
}

}  // namespace smp::lanes
