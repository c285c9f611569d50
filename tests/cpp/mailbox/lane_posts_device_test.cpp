// No thread that posts waits for a device, however small the tensor is.

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/mailbox/lane_posts.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::mailbox {
namespace {

// Posts of one rank on a device that does nothing until it is told to.
class LanePostsDevice : public testing::Test {
 protected:
  void SetUp() override {
    fake_device::reset();
    fake_device::set_lazy(true);
  }
  void TearDown() override {
    posts_.stop();
    fake_device::reset();
  }

  // One number, which a kernel writes.
  at::Tensor number(double value) {
    const at::Tensor tensor = at::empty(
        {1}, at::TensorOptions(at::kDouble).device(fake_device::device(0)));
    auto* const data = static_cast<double*>(tensor.mutable_data_ptr());
    fake_device::launch([this, data, value] {
      *data = value;
      num_kernels_run_.fetch_add(1);
    });
    return tensor;
  }

  void post(const at::Tensor& tensor) {
    Message message;
    message.channel = Channel::kPipeline;
    if (tensor.defined())
      message.tensors.push_back({.data = tensor, .is_stable = true});
    posts_.post(1, std::move(message));
  }

  size_t num_sent() {
    const std::lock_guard lock(mutex_);
    return sent_.size();
  }

  std::atomic<int> num_kernels_run_{0};
  std::mutex mutex_;
  std::vector<Message> sent_;
  LanePosts posts_{{.device = fake_device::device(0)},
                   {.global_rank = 0,
                    .faults = std::make_shared<health::FaultBoard>(0),
                    .deliver = {},
                    .device = fake_device::device(0)},
                   2,
                   [this](int, Message message) {
                     const std::lock_guard lock(mutex_);
                     sent_.push_back(std::move(message));
                   }};
};

TEST_F(LanePostsDevice, sends_small_tensors_when_their_work_is_over) {
  const at::Tensor first = number(7);
  const at::Tensor second = number(8);
  post(first);
  post(second);
  post({});
  EXPECT_EQ(num_kernels_run_, 0) << "a post has waited for the device";
  EXPECT_EQ(posts_.num_unsent(), 3) << "nothing overtakes them either";
  EXPECT_EQ(num_sent(), 0U);
  fake_device::run_all();
  ASSERT_TRUE(becomes_true([&] { return num_sent() == 3; }));
  EXPECT_TRUE(becomes_true([&] { return posts_.num_unsent() == 0; }));
  EXPECT_EQ(num_kernels_run_, 2);
  for (size_t i = 0; i < 2; ++i) {
    const MessageTensor& tensor = sent_[i].tensors.at(0);
    ASSERT_TRUE(tensor.lane);
    EXPECT_EQ(tensor.lane->lane, lanes::LaneKind::kHost);
    EXPECT_EQ(tensor.data.item<double>(), 7.0 + static_cast<double>(i));
  }
  EXPECT_TRUE(sent_[2].tensors.empty());
}

}  // namespace
}  // namespace smp::mailbox
