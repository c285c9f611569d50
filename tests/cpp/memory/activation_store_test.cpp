#include "csrc/memory/activation_store.h"

#include <ATen/ops/add.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/common/task_scope.h"

namespace smp::memory {
namespace {

using KeptPtr = std::shared_ptr<ActivationStore::Kept>;
using WeakTensor =
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

std::shared_ptr<ActivationStore> make_store(int horizon = 4) {
  ActivationStore::Options options;
  options.horizon = horizon;
  options.min_bytes = 1024;
  return std::make_shared<ActivationStore>(options);
}

at::Tensor activation() { return at::randn({32, 16}); }

TEST(HostPool, classes_are_at_most_an_eighth_larger) {
  for (int64_t size = 1 << 16; size < 1 << 22; size = size * 9 / 7 + 13) {
    const int64_t cls = HostPool::size_class(size);
    EXPECT_GE(cls, size);
    EXPECT_LE(cls, size + size / 8 + 1);
    EXPECT_EQ(HostPool::size_class(cls), cls);
  }
}

TEST(HostPool, slots_are_used_again_within_their_class) {
  HostPool pool(false);
  const at::Tensor first = pool.take(100000);
  void* const memory = first.data_ptr();
  pool.give_back(first);
  EXPECT_EQ(pool.take(100001).data_ptr(), memory);
  pool.take(500000);
  EXPECT_EQ(pool.stats().num_slots, 2);
  EXPECT_EQ(pool.stats().slots_in_use, 2);
  EXPECT_EQ(pool.stats().peak_slots_in_use, 2);
}

TEST(ActivationStore, takes_the_tensor_and_gives_equal_values_back) {
  const auto store = make_store();
  const at::Tensor expected = activation().t();
  std::vector<at::Tensor> tensors{expected.clone(at::MemoryFormat::Preserve)};
  const std::vector<int64_t> strides = tensors[0].strides().vec();
  const WeakTensor weak(tensors[0].getIntrusivePtr());
  const ActivationId id = store->begin_forward();
  KeptPtr kept = store->keep(id, tensors);
  EXPECT_FALSE(tensors[0].defined());
  EXPECT_TRUE(weak.expired());
  store->begin_backward(id);
  const std::vector<at::Tensor> back = store->tensors_of(*kept);
  EXPECT_TRUE(at::equal(back[0], expected));
  EXPECT_EQ(back[0].strides().vec(), strides);
  EXPECT_EQ(store->stats().pool.slots_in_use, 1);
  kept = nullptr;
  const ActivationStore::Stats stats = store->stats();
  EXPECT_EQ(stats.pool.slots_in_use, 0);
  EXPECT_EQ(stats.num_offloaded, 1);
  EXPECT_EQ(stats.bytes_offloaded, 32 * 16 * 4);
}

TEST(ActivationStore, leaves_what_is_not_worth_it) {
  const auto store = make_store();
  std::vector<at::Tensor> tensors{
      at::randn({8}),                   // small
      at::Tensor(),                     // none
      at::full({1}, 1.0).expand(4096),  // not dense
      activation().requires_grad_(),    // a leaf, perhaps a parameter
  };
  const std::vector<at::Tensor> before = tensors;
  const auto kept = store->keep(store->begin_forward(), tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_TRUE(tensors[i].is_same(before[i])) << i;
  }
  EXPECT_EQ(store->stats().num_offloaded, 0);
  for (const at::Tensor& tensor : store->tensors_of(*kept)) {
    EXPECT_FALSE(tensor.defined());
  }
}

TEST(ActivationStore, what_several_checkpoints_keep_goes_once) {
  const auto store = make_store();
  const at::Tensor mask = activation();
  std::vector<KeptPtr> all;
  for (int i = 0; i < 3; ++i) {
    std::vector<at::Tensor> tensors{mask};
    all.push_back(store->keep(store->begin_forward(), tensors));
  }
  EXPECT_EQ(store->stats().num_offloaded, 1);
  all.erase(all.begin());
  EXPECT_TRUE(at::equal(store->tensors_of(*all[1])[0], mask));
  all.clear();
  EXPECT_EQ(store->stats().pool.slots_in_use, 0);
}

TEST(ActivationStore, an_argument_that_changed_since_is_an_error) {
  const auto store = make_store();
  const at::Tensor argument = activation();
  std::vector<at::Tensor> tensors{argument};
  const auto kept = store->keep(store->begin_forward(), tensors);
  argument.add_(1);
  EXPECT_THROW(store->tensors_of(*kept), ValueError);
}

// A step of one microbatch: forwards, then backwards.
void run_step(ActivationStore& store, int64_t step, int num_layers) {
  const TaskScope scope({step, 0});
  std::vector<std::pair<ActivationId, KeptPtr>> all;
  std::vector<at::Tensor> expected;
  for (int i = 0; i < num_layers; ++i) {
    std::vector<at::Tensor> tensors{activation()};
    expected.push_back(tensors[0].clone());
    const ActivationId id = store.begin_forward();
    all.emplace_back(id, store.keep(id, tensors));
    if (tensors[0].defined()) expected.back() = at::Tensor();
  }
  while (!all.empty()) {
    store.begin_backward(all.back().first);
    const at::Tensor back = store.tensors_of(*all.back().second)[0];
    EXPECT_EQ(back.defined(), expected.back().defined());
    if (back.defined()) {
      EXPECT_TRUE(at::equal(back, expected.back()));
    }
    expected.pop_back();
    all.pop_back();
  }
}

TEST(ActivationStore, learns_from_the_first_step_what_stays) {
  const auto store = make_store(4);
  run_step(*store, 1, 6);
  ActivationStore::Stats stats = store->stats();
  EXPECT_EQ(stats.num_offloaded, 6);
  EXPECT_EQ(stats.num_stayed, 0);
  EXPECT_EQ(stats.num_loaded_late, 1) << "of the first backward";
  EXPECT_EQ(stats.num_loaded_ahead, 5);
  EXPECT_EQ(stats.pool.peak_slots_in_use, 6);
  for (int64_t step = 2; step < 5; ++step) run_step(*store, step, 6);
  stats = store->stats();
  EXPECT_EQ(stats.num_stayed, 3 * 2);
  EXPECT_EQ(stats.num_offloaded, 6 + 3 * 4);
  EXPECT_EQ(stats.num_loaded_late, 1) << "none of later steps";
  EXPECT_EQ(stats.num_loaded_ahead, 5 + 3 * 4);
  EXPECT_EQ(stats.pool.slots_in_use, 0);
  EXPECT_EQ(stats.pool.num_slots, 6) << "made once";
}

TEST(ActivationStore, outside_of_steps_rounds_take_their_place) {
  const auto store = make_store(1);
  for (int round = 0; round < 3; ++round) run_step(*store, -1, 3);
  EXPECT_EQ(store->stats().num_stayed, 2) << "the last layer, but in round 0";
  EXPECT_EQ(store->stats().num_recomputed, 9);
}

TEST(ActivationStore, another_course_than_expected_is_no_error) {
  const auto store = make_store(2);
  run_step(*store, 1, 6);
  run_step(*store, 2, 2);
  run_step(*store, 3, 9);
  EXPECT_EQ(store->stats().pool.slots_in_use, 0);
  EXPECT_EQ(store->stats().num_recomputed, 17);
}

TEST(ActivationStore, a_graph_that_is_dropped_gives_its_slots_back) {
  const auto store = make_store();
  std::vector<at::Tensor> tensors{activation()};
  store->keep(store->begin_forward(), tensors);
  EXPECT_EQ(store->stats().num_offloaded, 1);
  EXPECT_EQ(store->stats().pool.slots_in_use, 0);
}

// Returns a result of an operator, as autograd saves it.
at::Tensor result() { return activation().requires_grad_().mul(2); }

TEST(SavedTensors, a_storage_goes_once_and_comes_back_as_it_was) {
  const auto store = make_store();
  ActivationStore::Saving saving(store);
  at::Tensor whole = result();
  const WeakTensor weak(whole.getIntrusivePtr());
  std::vector<at::Tensor> expected;
  std::vector<std::shared_ptr<ActivationStore::Saved>> all;
  for (at::Tensor view : {whole.narrow(1, 8, 8), whole.t(), whole,
                          whole.narrow(1, 3, 1).expand({32, 5})}) {
    expected.push_back(view.detach().clone());
    ASSERT_TRUE(all.emplace_back(saving.save(view)));
    EXPECT_EQ(all.back()->tensor().strides(), view.strides());
  }
  saving.end();
  whole.reset();
  EXPECT_TRUE(weak.expired());
  for (size_t i = 0; i < all.size(); ++i) {
    const at::Tensor back = all[i]->tensor();
    EXPECT_TRUE(at::equal(back, expected[i])) << i;
    EXPECT_TRUE(!back.requires_grad() && !back.is_view());
  }
  EXPECT_EQ(store->stats().num_offloaded, 1);
  EXPECT_EQ(store->stats().pool.slots_in_use, 1);
  all.clear();
  EXPECT_EQ(store->stats().pool.slots_in_use, 0);
}

TEST(SavedTensors, parameters_and_parts_of_data_stay) {
  const auto store = make_store();
  ActivationStore::Saving saving(store);
  const at::Tensor parameter = activation().requires_grad_();
  const at::Tensor buffer = activation();
  store->set_resident({buffer});
  for (const at::Tensor& tensor :
       {parameter, parameter.t(), buffer, buffer.t(), at::randn({8}),
        activation().narrow(0, 0, 16), at::empty({0})}) {
    EXPECT_FALSE(saving.save(tensor));
  }
  EXPECT_TRUE(saving.save(activation())) << "a constant of its own";
}

TEST(SavedTensors, what_was_changed_since_is_an_error_and_not_shared) {
  const auto store = make_store();
  ActivationStore::Saving saving(store);
  at::Tensor tensor = result();
  const at::Tensor values = tensor.detach().clone();
  const auto before = saving.save(tensor);
  // Another tensor with the same memory, whose changes the first one misses.
  at::Tensor other = tensor.variable_data();
  other.add_(1);
  const auto shared = saving.save(other);
  EXPECT_TRUE(at::equal(shared->tensor(), other));
  EXPECT_TRUE(at::equal(before->tensor(), values));
  tensor.detach().add_(1);
  const auto after = saving.save(tensor);
  EXPECT_TRUE(at::equal(after->tensor(), tensor.detach()));
  EXPECT_THROW(before->tensor(), Error);
  EXPECT_EQ(store->stats().num_offloaded, 3);
}

TEST(SavedTensors, groups_are_the_tasks_and_the_next_ones_come_ahead) {
  ActivationStore::Options options;
  options.horizon = 2;
  options.min_bytes = 64;
  options.group_bytes = 2 * 32 * 16 * 4;
  const auto store = std::make_shared<ActivationStore>(options);
  for (int64_t step = 0; step < 3; ++step) {
    const TaskScope scope({step, 0});
    std::vector<at::Tensor> expected;
    std::vector<std::shared_ptr<ActivationStore::Saved>> all;
    ActivationStore::Saving saving(store);
    for (int i = 0; i < 12; ++i) {
      expected.push_back(activation());
      all.push_back(saving.save(expected.back()));
    }
    saving.end();
    for (; !all.empty(); all.pop_back(), expected.pop_back()) {
      EXPECT_TRUE(at::equal(all.back()->tensor(), expected.back()));
    }
  }
  const ActivationStore::Stats stats = store->stats();
  // Six groups of two; the last one is needed at once, and stays from the
  // second step on.
  EXPECT_EQ(stats.num_stayed, 2 * 2);
  EXPECT_EQ(stats.num_offloaded, 3 * 12 - stats.num_stayed);
  EXPECT_LE(stats.num_loaded_late, 2) << "the first group of the first step";
  EXPECT_EQ(stats.pool.slots_in_use, 0);
}

TEST(ActivationStore, threads_keep_and_take_their_own) {
  const auto store = make_store();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        const at::Tensor expected = at::full({512}, i);
        std::vector<at::Tensor> tensors{expected.clone()};
        const ActivationId id = store->begin_forward();
        const auto kept = store->keep(id, tensors);
        store->begin_backward(id);
        const at::Tensor back = store->tensors_of(*kept)[0];
        EXPECT_TRUE(!back.defined() || at::equal(back, expected));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(store->stats().pool.slots_in_use, 0);
  EXPECT_EQ(store->stats().num_recomputed, 800);
}

}  // namespace
}  // namespace smp::memory
