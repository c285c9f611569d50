#include "csrc/lanes/lane_table.h"

#include <utility>

#include "csrc/common/check.h"

namespace smp::lanes {

LaneTable::LaneTable(const LaneOptions& options, int global_rank,
                     std::shared_ptr<health::FaultBoard> faults,
                     DeviceLane::SendReceipt receipts)
    : device_(options.device), host_(options.device) {
  SMP_CHECK_VALUE(!options.fake || device_.is_cpu(),
                  "a fake lane carries tensors of the CPU, this rank works on ",
                  device_, "; unset SMP_TEST_LANES");
  if (options.fake) {
    fake_ = std::make_unique<FakeLane>(*options.fake, global_rank,
                                       std::move(faults), std::move(receipts));
  }
}

bool LaneTable::takes(const at::Tensor& tensor) const {
  if (tensor.device().type() != device_.type()) return false;
  if (tensor.layout() != at::kStrided || tensor.is_quantized()) return false;
  // However few: a copy into the message would wait for the device.
  return tensor.nbytes() > 0;
}

Posted LaneTable::post(int dst, const at::Tensor& data, bool is_stable) {
  std::optional<Posted> posted;
  if (fake_) {
    posted = fake_->post(dst, data, is_stable);
    if (!posted) ++times_full_;
  }
  if (!posted) posted = host_.post(dst, data, is_stable);
  ++tensors_sent_;
  bytes_sent_ += posted->descriptor.num_bytes;
  return *std::move(posted);
}

DeviceLane& LaneTable::lane_of(LaneKind kind) {
  if (kind == LaneKind::kHost) return host_;
  SMP_CHECK(fake_,
            "a tensor comes over a fake lane, which this rank does not "
            "have; set SMP_TEST_LANES on all ranks or on none");
  return *fake_;
}

at::Tensor LaneTable::new_payload(const Descriptor& descriptor) {
  return lane_of(descriptor.lane).new_payload(descriptor);
}

memory::MarkedTensor LaneTable::take(int src, const Descriptor& descriptor,
                                     at::Tensor payload) {
  ++tensors_received_;
  return lane_of(descriptor.lane).take(src, descriptor, std::move(payload));
}

void LaneTable::acknowledge(int src, const Receipt& receipt) {
  lane_of(receipt.lane).acknowledge(src, receipt);
}

void LaneTable::stop() {
  host_.stop();
  if (fake_) fake_->stop();
}

LaneCounters LaneTable::counters() const {
  return {tensors_sent_, bytes_sent_, tensors_received_, times_full_};
}

}  // namespace smp::lanes
