// The end of lanes whose device has failed. CUDA then returns the error from
// all calls; destructors, which may run because of the error, do not throw.

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/lanes/group_copies.h"
#include "csrc/lanes/ipc_lane.h"
#include "tests/cpp/lanes/fake_copies.h"
#include "tests/cpp/lanes/meeting_groups.h"

namespace smp::lanes {
namespace {

class FailedQueue final : public CopyQueue {
 public:
  void follow_caller() override { fail(); }
  void wait(const SharedEvent& /*event*/) override { fail(); }
  void copy(uint8_t* /*to*/, const uint8_t* /*from*/,
            int64_t /*num_bytes*/) override {
    fail();
  }
  void record(SharedEvent& /*event*/) override { fail(); }
  at::Tensor new_tensor(at::IntArrayRef /*sizes*/,
                        at::ScalarType /*dtype*/) override {
    fail();
  }
  void keep(const at::Tensor& /*tensor*/) override { fail(); }
  memory::Mark end() override { fail(); }

 private:
  [[noreturn]] static void fail() { throw Error("an illegal memory access"); }
};

class FailedCopies final : public DeviceCopies {
 public:
  explicit FailedCopies(std::unique_ptr<DeviceCopies> inner)
      : inner_(std::move(inner)) {}

  std::string device_name() const override { return inner_->device_name(); }
  std::vector<std::string> reachable() const override { return {}; }
  DeviceMemory allocate(int64_t num_bytes) override {
    return inner_->allocate(num_bytes);
  }
  std::string handle_of(const DeviceMemory& memory) override {
    return inner_->handle_of(memory);
  }
  DeviceMemory open_memory(const std::string& handle) override {
    return inner_->open_memory(handle);
  }
  SharedEventPtr new_event() override { return inner_->new_event(); }
  std::string handle_of(const SharedEvent& event) override {
    return inner_->handle_of(event);
  }
  SharedEventPtr open_event(const std::string& handle) override {
    return inner_->open_event(handle);
  }
  void put(uint8_t* to, const std::string& bytes) override {
    inner_->put(to, bytes);
  }
  std::string get(const uint8_t* from, int64_t num_bytes) override {
    return inner_->get(from, num_bytes);
  }
  CopyQueue& outgoing() override { return queue_; }
  CopyQueue& incoming() override { return queue_; }
  void stop() override { inner_->stop(); }

 private:
  const std::unique_ptr<DeviceCopies> inner_;
  FailedQueue queue_;
};

TEST(FailedDevice, ends_an_ipc_lane_without_an_exception) {
  const auto board = std::make_shared<health::FaultBoard>(0);
  const FakeOptions options{.num_slots = 2};
  IpcLane lane(
      std::make_unique<FailedCopies>(make_fake_copies(options, 0, board)),
      {.num_slots = 2, .slot_bytes = 1024}, 0, board,
      [](int, const Receipt&) {});
  lane.offer({1});
  EXPECT_NO_THROW(lane.stop());
}

class FailedGroup final : public MeetingGroup {
 public:
  using MeetingGroup::MeetingGroup;
  void abort() override {
    MeetingGroup::abort();
    throw Error("an illegal memory access");
  }
};

TEST(FailedDevice, ends_all_channels_without_an_exception) {
  MeetingRooms rooms;
  const auto copies = make_group_copies(
      c10::Device(c10::DeviceType::CPU), 0,
      {.make =
           [&](const CopyChannel& channel) {
             return std::make_shared<FailedGroup>(rooms.of(channel), 0);
           }},
      std::make_shared<health::FaultBoard>(0));
  for (const int index : {0, 1}) {
    copies->connect({0, 1, index}, "");
    copies->send({0, 1, index}, at::ones({3}));
  }
  EXPECT_NO_THROW(copies->stop());
  EXPECT_TRUE(rooms.of({0, 1, 0})->is_aborted);
  EXPECT_TRUE(rooms.of({0, 1, 1})->is_aborted);
}

}  // namespace
}  // namespace smp::lanes
