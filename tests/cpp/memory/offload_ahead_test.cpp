// Offloading while the host runs ahead of a device: no copy ends, and no event
// fires, before the host has asked for everything.

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/common/task_scope.h"
#include "csrc/memory/activation_store.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::memory {
namespace {

constexpr int kNumLayers = 12;
constexpr int64_t kNumValues = 1024;
constexpr int64_t kLayerBytes = kNumValues * sizeof(float);

class OffloadAheadTest : public testing::TestWithParam<bool> {
 protected:
  OffloadAheadTest() {
    fake_device::reset();
    fake_device::set_lazy(true);
    ActivationStore::Options options;
    options.device = stream.device();
    options.horizon = 2;
    options.min_bytes = 1024;
    store = std::make_shared<ActivationStore>(options);
  }
  ~OffloadAheadTest() override {
    store = nullptr;
    fake_device::reset();
  }

  // Asks the stream for what a layer computes of its microbatch.
  at::Tensor forward(int layer) {
    const at::Tensor made =
        at::empty({kNumValues}, at::TensorOptions(stream.device()));
    auto* const values = static_cast<float*>(made.mutable_data_ptr());
    fake_device::launch([=] {
      for (int64_t i = 0; i < kNumValues; ++i) {
        values[i] = static_cast<float>(layer * kNumValues + i);
      }
    });
    return made;
  }

  // Reads what came back, later.
  void backward(int layer, const at::Tensor& back) {
    const auto* const values = static_cast<const float*>(back.const_data_ptr());
    fake_device::launch([=, this] {
      for (int64_t i = 0; i < kNumValues; ++i) {
        num_wrong += values[i] != static_cast<float>(layer * kNumValues + i);
      }
      ++num_read;
    });
  }

  // @return how much there was on the device at most while layers went forward
  int64_t step(int64_t number) {
    const TaskScope scope({number, 0});
    const int64_t before = fake_device::bytes_in_use();
    int64_t most = 0;
    std::vector<std::pair<ActivationId, std::shared_ptr<ActivationStore::Kept>>>
        all;
    for (int layer = 0; layer < kNumLayers; ++layer) {
      std::vector<at::Tensor> tensors{forward(layer)};
      const ActivationId id = store->begin_forward();
      all.emplace_back(id, store->keep(id, tensors));
      stayed.push_back(tensors[0]);
      most = std::max(most, fake_device::bytes_in_use() - before);
    }
    while (!all.empty()) {
      const int layer = static_cast<int>(all.size()) - 1;
      store->begin_backward(all.back().first);
      const at::Tensor back = store->tensors_of(*all.back().second)[0];
      backward(layer, back.defined() ? back : stayed.back());
      stayed.pop_back();
      all.pop_back();
    }
    return most;
  }

  const c10::Stream stream = fake_device::new_stream(1);
  const c10::StreamGuard guard{stream};
  std::shared_ptr<ActivationStore> store;
  std::vector<at::Tensor> stayed;  // those that were not taken
  int64_t num_wrong = 0;
  int num_read = 0;
};

TEST_P(OffloadAheadTest, saved_tensors_are_bounded_and_exact_as_well) {
  const TaskScope scope({0, 0});
  store = std::make_shared<ActivationStore>(
      ActivationStore::Options{.device = stream.device(),
                               .horizon = 2,
                               .min_bytes = 1024,
                               .group_bytes = kLayerBytes});
  const int64_t before = fake_device::bytes_in_use();
  int64_t most = 0;
  std::vector<std::shared_ptr<ActivationStore::Saved>> all;
  ActivationStore::Saving saving(store);
  for (int layer = 0; layer < kNumLayers; ++layer) {
    all.push_back(saving.save(forward(layer)));
    most = std::max(most, fake_device::bytes_in_use() - before);
  }
  saving.end();
  while (!all.empty()) {
    backward(static_cast<int>(all.size()) - 1, all.back()->tensor());
    all.pop_back();
    most = std::max(most, fake_device::bytes_in_use() - before);
  }
  EXPECT_LE(most, (2 + ActivationStore::kMaxLeaving) * kLayerBytes);
  EXPECT_EQ(store->stats().num_offloaded, kNumLayers);
  fake_device::run_all(/*copies_first=*/GetParam());
  EXPECT_EQ(num_read, kNumLayers);
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(OffloadAheadTest, what_leaves_is_bounded_and_values_are_exact) {
  // The current layer's and those that leave; later ones stay, being needed
  // soon.
  const int64_t bound = (1 + ActivationStore::kMaxLeaving) * kLayerBytes;
  EXPECT_LE(step(0), bound);
  EXPECT_EQ(store->stats().num_offloaded, kNumLayers);
  for (int number = 1; number < 4; ++number) {
    EXPECT_LE(step(number), bound + store->stats().num_stayed * kLayerBytes);
  }
  EXPECT_GT(store->stats().num_offloaded, 2 * kNumLayers);
  EXPECT_EQ(num_read, 0) << "the device has done nothing yet";
  fake_device::run_all(/*copies_first=*/GetParam());
  EXPECT_EQ(num_read, 4 * kNumLayers);
  EXPECT_EQ(num_wrong, 0);
}

TEST_P(OffloadAheadTest, a_device_that_keeps_up_waits_for_nothing) {
  const TaskScope scope({0, 0});
  for (int layer = 0; layer < kNumLayers; ++layer) {
    std::vector<at::Tensor> tensors{forward(layer)};
    const auto kept = store->keep(store->begin_forward(), tensors);
    fake_device::run_all(GetParam());
    EXPECT_LE(fake_device::bytes_in_use(), kLayerBytes);
  }
}

INSTANTIATE_TEST_SUITE_P(Order, OffloadAheadTest, testing::Bool());

}  // namespace
}  // namespace smp::memory
