#include "csrc/pipeline/tensor_store.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

namespace smp::pipeline {
namespace {

at::Tensor value(double number) { return at::full({2}, number, at::kDouble); }

double number_of(const memory::MarkedTensor& tensor) {
  return tensor.data.const_data_ptr<double>()[0];
}

// Notes what a waiting callback got.
struct Waiter {
  TensorStore::Callback callback() {
    return [this](const memory::MarkedTensor& tensor) {
      got.push_back(number_of(tensor));
    };
  }
  std::vector<double> got;
};

TEST(TensorStore, those_who_wait_are_called_once_in_their_order) {
  TensorStore store;
  std::string order;
  store.when_available({0, 1}, 0,
                       [&](const memory::MarkedTensor&) { order += "a"; });
  store.when_available({0, 1}, 0,
                       [&](const memory::MarkedTensor&) { order += "b"; });
  store.when_available({1, 1}, 0,
                       [&](const memory::MarkedTensor&) { order += "X"; });
  EXPECT_EQ(order, "");
  store.put({0, 1}, 0, {value(3)});
  EXPECT_EQ(order, "ab") << "the ref of another rank has not come";
  Waiter late;
  store.when_available({0, 1}, 0, late.callback());
  EXPECT_EQ(late.got, std::vector<double>{3}) << "at once";
  EXPECT_EQ(number_of(store.find({0, 1})), 3);
  EXPECT_FALSE(store.find({1, 1}).data.defined());
  EXPECT_FALSE(store.find({7, 7}).data.defined());
  EXPECT_EQ(store.size(), 2);
}

TEST(TensorStore, a_second_put_is_ignored) {
  TensorStore store;
  store.put({0, 1}, 0, {value(3)});
  store.put({0, 1}, 0, {value(4)});
  EXPECT_EQ(number_of(store.find({0, 1})), 3);
  EXPECT_EQ(store.size(), 1);
}

TEST(TensorStore, a_release_frees_the_data) {
  TensorStore store;
  at::Tensor data = value(3);
  store.put({0, 1}, 0, {data});
  EXPECT_EQ(data.use_count(), 2);
  store.release({0, 1}, 0);
  EXPECT_EQ(data.use_count(), 1);
  EXPECT_EQ(store.size(), 0);
}

TEST(TensorStore, data_released_before_they_came_serve_those_who_wait_and_go) {
  TensorStore store;
  Waiter waiter;
  store.when_available({0, 1}, 0, waiter.callback());
  store.release({0, 1}, 0);
  EXPECT_EQ(store.size(), 1);
  at::Tensor data = value(3);
  store.put({0, 1}, 0, {data});
  EXPECT_EQ(waiter.got, std::vector<double>{3});
  EXPECT_EQ(store.size(), 0);
  EXPECT_EQ(data.use_count(), 1);
}

TEST(TensorStore, data_that_nobody_waited_for_go_when_released_before) {
  TensorStore store;
  store.release({0, 1}, 0);
  EXPECT_EQ(store.size(), 1) << "remembered until the data come";
  store.put({0, 1}, 0, {value(3)});
  EXPECT_EQ(store.size(), 0);
}

// Releases travel with whatever goes to a rank next, so their message belongs
// to any microbatch, which may be over before the data arrive.
TEST(TensorStore, a_release_by_another_microbatch_does_not_disturb_who_waits) {
  TensorStore store;
  Waiter waiter;
  store.when_available({0, 1}, 2, waiter.callback());
  store.release({0, 1}, 5);
  store.drop_microbatch(5);
  EXPECT_EQ(store.size(), 1);
  store.put({0, 1}, 2, {value(3)});
  EXPECT_EQ(waiter.got, std::vector<double>{3});
  EXPECT_EQ(store.size(), 0);
}

TEST(TensorStore, who_waits_after_a_release_by_another_microbatch_is_served) {
  TensorStore store;
  Waiter waiter;
  store.release({0, 1}, 5);
  store.when_available({0, 1}, 2, waiter.callback());
  store.drop_microbatch(5);
  store.put({0, 1}, 2, {value(3)});
  EXPECT_EQ(waiter.got, std::vector<double>{3});
  EXPECT_EQ(store.size(), 0);
}

TEST(TensorStore, the_end_of_a_microbatch_drops_all_of_it_and_nothing_else) {
  TensorStore store;
  Waiter dropped;
  Waiter kept;
  at::Tensor data = value(3);
  store.put({0, 1}, 2, {data});
  store.when_available({0, 2}, 2, dropped.callback());
  store.release({0, 3}, 2);
  store.put({0, 4}, 3, {value(4)});
  store.when_available({0, 5}, 3, kept.callback());
  store.drop_microbatch(2);
  EXPECT_EQ(store.size(), 2);
  EXPECT_EQ(data.use_count(), 1);
  EXPECT_EQ(number_of(store.find({0, 4})), 4);
  store.put({0, 5}, 3, {value(5)});
  EXPECT_EQ(kept.got, std::vector<double>{5});
  store.put({0, 2}, 2, {value(6)});
  EXPECT_TRUE(dropped.got.empty());
  store.clear();
  EXPECT_EQ(store.size(), 0);
}

TEST(TensorStore, a_callback_may_use_the_store) {
  TensorStore store;
  Waiter second;
  store.when_available({0, 1}, 0, [&](const memory::MarkedTensor& tensor) {
    store.put({0, 2}, 0, {tensor});
    store.release({0, 1}, 0);
  });
  store.when_available({0, 2}, 0, second.callback());
  store.put({0, 1}, 0, {value(3)});
  EXPECT_EQ(second.got, std::vector<double>{3});
  EXPECT_EQ(store.size(), 1);
}

TEST(TensorStore, data_destroyed_by_a_release_may_use_the_store) {
  TensorStore store;
  bool is_freed = false;
  {
    const auto bytes = std::make_shared<std::vector<double>>(2);
    store.put({0, 1}, 0, {at::from_blob(bytes->data(), {2}, [&, bytes](void*) {
                is_freed = store.size() == 0;
              })});
  }
  store.release({0, 1}, 0);
  EXPECT_TRUE(is_freed);
}

TEST(TensorStore, threads_that_bring_and_threads_that_wait_always_meet) {
  constexpr int kRefs = 500;
  for (int round = 0; round < 4; ++round) {
    TensorStore store;
    std::atomic<int> num_served{0};
    std::vector<std::thread> threads;
    for (int part = 0; part < 2; ++part) {
      threads.emplace_back([&, part] {
        for (int i = part; i < kRefs; i += 2) store.put({0, i}, i, {value(i)});
      });
      threads.emplace_back([&] {
        for (int i = 0; i < kRefs; ++i) {
          store.when_available({0, i}, i,
                               [&, i](const memory::MarkedTensor& tensor) {
                                 if (number_of(tensor) == i) ++num_served;
                               });
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(num_served, 2 * kRefs);
    std::thread releases([&] {
      for (int i = 0; i < kRefs; i += 2) store.release({0, i}, i);
    });
    for (int i = 1; i < kRefs; i += 2) store.drop_microbatch(i);
    releases.join();
    EXPECT_EQ(store.size(), 0);
  }
}

}  // namespace
}  // namespace smp::pipeline
