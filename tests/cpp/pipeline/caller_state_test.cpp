#include "csrc/pipeline/caller_state.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace smp::pipeline {
namespace {

RemoteRefPtr remember(CallerState& caller, const at::Tensor& tensor) {
  const auto ref = std::make_shared<RemoteRef>();
  caller.sent.push_back({CallerState::WeakTensor(tensor.getIntrusivePtr()),
                         static_cast<uint32_t>(tensor._version()), ref});
  return ref;
}

TEST(CallerState, a_tensor_sent_before_is_known_by_its_name) {
  CallerState caller;
  const at::Tensor a = at::ones({2});
  const at::Tensor b = at::ones({2});
  const RemoteRefPtr ref_a = remember(caller, a);
  const RemoteRefPtr ref_b = remember(caller, b);
  EXPECT_EQ(caller.find_sent(a), ref_a);
  EXPECT_EQ(caller.find_sent(b), ref_b);
  EXPECT_EQ(caller.find_sent(at::ones({2})), nullptr);
  EXPECT_EQ(caller.find_sent(a.detach()), nullptr) << "another tensor";
}

TEST(CallerState, a_tensor_that_has_changed_must_be_sent_again) {
  CallerState caller;
  at::Tensor a = at::ones({2});
  const at::Tensor b = at::ones({2});
  std::weak_ptr<RemoteRef> ref_a = remember(caller, a);
  const RemoteRefPtr ref_b = remember(caller, b);
  a.add_(1);
  EXPECT_EQ(caller.find_sent(a), nullptr);
  EXPECT_TRUE(ref_a.expired()) << "its old data are of no use";
  EXPECT_EQ(caller.find_sent(b), ref_b);
}

TEST(CallerState, tensors_that_are_gone_are_forgotten) {
  CallerState caller;
  at::Tensor a = at::ones({2});
  const at::Tensor b = at::ones({2});
  std::weak_ptr<RemoteRef> ref_a = remember(caller, a);
  remember(caller, b);
  a.reset();
  caller.find_sent(b);
  EXPECT_TRUE(ref_a.expired());
  EXPECT_EQ(caller.sent.size(), 1u);
}

TEST(CallerState, refs_that_are_gone_do_not_fill_the_memory) {
  CallerState caller;
  std::vector<RemoteRefPtr> kept;
  for (int i = 0; i < 10'000; ++i) {
    const auto ref = std::make_shared<RemoteRef>();
    if (i % 100 == 0) kept.push_back(ref);
    caller.add_ref(ref);
  }
  EXPECT_LE(caller.refs.size(), 4 * kept.size());
  size_t num_alive = 0;
  for (const auto& weak : caller.refs) num_alive += weak.expired() ? 0 : 1;
  EXPECT_EQ(num_alive, kept.size()) << "those alive stay";
}

}  // namespace
}  // namespace smp::pipeline
