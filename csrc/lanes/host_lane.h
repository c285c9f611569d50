#pragma once

#include <c10/core/Device.h>

#include "csrc/lanes/device_lane.h"
#include "csrc/memory/copy_stream.h"

namespace smp::lanes {

/// Moves tensors through memory of both hosts: a copy to page-locked memory,
/// beside the compute, which the message carries, and a copy to the device on
/// the other side. Has no slots, so it takes tensors when another lane has no
/// free slot. CPU tensors are their own payload.
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
