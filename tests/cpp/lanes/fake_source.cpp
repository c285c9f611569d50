#include "tests/cpp/lanes/fake_source.h"

#include <memory>

#include "csrc/common/check.h"
#include "tests/cpp/lanes/fake_copies.h"
#include "tests/cpp/lanes/fake_lane.h"
#include "tests/cpp/lanes/fake_meeting.h"

namespace smp::lanes {
namespace {

LaneParts make_fakes(const FakeOptions& fake, c10::Device device,
                     int global_rank,
                     const std::shared_ptr<health::FaultBoard>& faults,
                     const DeviceLane::SendReceipt& receipts) {
  SMP_CHECK_VALUE(device.is_cpu(),
                  "a fake lane carries tensors of the CPU, this rank works on ",
                  device, "; unset SMP_TEST_LANES");
  LaneParts parts{
      .ring = {.num_slots = fake.num_slots, .slot_bytes = fake.slot_bytes},
      .channels = {.num_channels = fake.num_slots},
      .why_no_copies = "the lanes of this test map no memory",
      .why_no_meetings = "the lanes of this test have no NCCL"};
  if (fake.has_ring) {
    parts.copies = make_fake_copies(fake, global_rank, faults);
    parts.why_no_copies.clear();
  }
  if (fake.has_meeting) {
    parts.meetings = make_fake_meeting(fake, global_rank, faults);
    parts.why_no_meetings.clear();
  }
  if (!fake.has_ring && !fake.has_meeting) {
    parts.other =
        std::make_unique<FakeLane>(fake, global_rank, faults, receipts);
  }
  return parts;
}

}  // namespace

LaneSource fake_source(const FakeOptions& options) {
  return {.make =
              [options](c10::Device device, int global_rank, const auto& faults,
                        const auto& receipts) {
                return make_fakes(options, device, global_rank, faults,
                                  receipts);
              },
          .needs_agreement = options.has_ring || options.has_meeting};
}

}  // namespace smp::lanes
