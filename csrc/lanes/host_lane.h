#pragma once

#include <c10/core/Device.h>

#include "csrc/lanes/device_lane.h"
#include "csrc/memory/copy_stream.h"

namespace smp::lanes {

/// Through memory of both hosts: a copy beside the compute into page-locked
/// memory, which the message carries, and another one up on the other side. It
/// has no slots, so it is there when another lane has none left. CPU tensors
/// are their own payload.
class HostLane final : public DeviceLane {
 public:
  explicit HostLane(c10::Device device);

  std::optional<Posted> post(int dst, const at::Tensor& data,
                             bool is_stable) override;
  at::Tensor new_payload(const Descriptor& descriptor) const override;
  memory::MarkedTensor take(int src, const Descriptor& descriptor,
                            at::Tensor payload) override;
  void acknowledge(int src, const Receipt& receipt) override;
  void stop() override {}

 private:
  const c10::Device device_;
  memory::CopyStream to_host_;
  memory::CopyStream to_device_;
};

}  // namespace smp::lanes
