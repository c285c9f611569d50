#include "csrc/pipeline/remote_ref.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace smp::pipeline {
namespace {

at::Tensor handle() {
  return at::empty({2}, at::TensorOptions(at::kDouble).device(at::kMeta));
}

RemoteRefPtr make_ref(const std::shared_ptr<ReleaseList>& releases,
                      int64_t id = 1, int home = 1) {
  auto ref = std::make_shared<RemoteRef>();
  ref->ref = {0, id};
  ref->home_rank = home;
  ref->releases = releases;
  return ref;
}

TEST(TensorMeta, tells_what_is_known_without_data) {
  const auto meta =
      TensorMeta::of(at::empty({3, 4}, at::kFloat).set_requires_grad(true));
  EXPECT_EQ(meta.sizes, (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(meta.dtype, at::kFloat);
  EXPECT_TRUE(meta.requires_grad);
  EXPECT_EQ(meta.num_bytes(), 48);
  EXPECT_EQ(TensorMeta::of(at::empty({}, at::kDouble)).num_bytes(), 8);
  EXPECT_EQ(TensorMeta::of(at::empty({0, 7}, at::kDouble)).num_bytes(), 0);
}

TEST(RemoteRef, the_last_handle_releases_the_data_of_all_holders) {
  const auto releases = std::make_shared<ReleaseList>();
  at::Tensor first = handle();
  {
    const RemoteRefPtr ref = make_ref(releases);
    ref->copies = {2, 3};
    attach_remote_ref(first, ref);
  }
  at::Tensor second = handle();
  attach_remote_ref(second, remote_ref_of(first));
  first.reset();
  EXPECT_TRUE(releases->take().empty()) << "the second handle needs them";
  second.reset();
  const auto released = releases->take();
  ASSERT_EQ(released.size(), 1u);
  EXPECT_EQ(released[0].ref.id, 1);
  std::vector<int> holders = released[0].holders;
  std::sort(holders.begin(), holders.end());
  EXPECT_EQ(holders, (std::vector<int>{1, 2, 3}));
  EXPECT_TRUE(releases->take().empty()) << "told once";
}

TEST(RemoteRef, a_detached_handle_stands_for_the_same_data) {
  const auto releases = std::make_shared<ReleaseList>();
  at::Tensor first = handle();
  attach_remote_ref(first, make_ref(releases));
  const at::Tensor second = first.detach();
  EXPECT_EQ(remote_ref_of(second), remote_ref_of(first));
}

TEST(RemoteRef, an_ordinary_tensor_has_none) {
  EXPECT_EQ(remote_ref_of(at::empty({2})), nullptr);
  EXPECT_EQ(remote_ref_of(at::Tensor()), nullptr);
  EXPECT_EQ(remote_ref_of(handle()), nullptr);
}

// The data of an argument are the caller's own tensor.
TEST(RemoteRef, an_argument_is_released_by_those_it_was_sent_to_only) {
  const auto releases = std::make_shared<ReleaseList>();
  {
    const RemoteRefPtr ref = make_ref(releases, 5, 0);
    ref->is_argument = true;
    ref->copies = {2};
  }
  const auto released = releases->take();
  ASSERT_EQ(released.size(), 1u);
  EXPECT_EQ(released[0].holders, std::vector<int>{2});
}

TEST(RemoteRef, names_of_other_ranks_are_theirs_to_release) {
  const RemoteRefPtr ref = make_ref(nullptr);
  EXPECT_EQ(ref.use_count(), 1);  // ends without a list
}

TEST(RemoteRef, a_destination_that_was_foreseen_in_vain_is_unlearned) {
  const auto route = std::make_shared<Route>();
  route->add(0, 2);
  route->add(0, 3);
  route->add(1, 2);
  {
    const RemoteRefPtr ref = make_ref(std::make_shared<ReleaseList>());
    ref->route = route;
    ref->result_idx = 0;
    ref->foreseen = {3};
  }
  EXPECT_EQ(route->hops(), (Route::Hops{{0, 2}, {1, 2}}));
}

TEST(Route, keeps_each_hop_once) {
  Route route;
  route.add(0, 2);
  route.add(0, 2);
  route.add(1, 2);
  EXPECT_EQ(route.hops(), (Route::Hops{{0, 2}, {1, 2}}));
  route.remove(0, 2);
  route.remove(0, 7);
  EXPECT_EQ(route.hops(), (Route::Hops{{1, 2}}));
}

TEST(ReleaseList, takes_from_any_thread_and_loses_nothing) {
  const auto releases = std::make_shared<ReleaseList>();
  constexpr int kPerThread = 200;
  std::vector<std::thread> threads;
  for (int part = 0; part < 3; ++part) {
    threads.emplace_back([&, part] {
      for (int i = 0; i < kPerThread; ++i) {
        at::Tensor tensor = handle();
        attach_remote_ref(tensor, make_ref(releases, part * kPerThread + i));
      }
    });
  }
  std::vector<bool> seen(3 * kPerThread);
  const auto collect = [&] {
    for (const auto& one : releases->take()) {
      EXPECT_FALSE(seen[one.ref.id]);
      seen[one.ref.id] = true;
    }
  };
  for (int i = 0; i < 50; ++i) collect();
  for (std::thread& thread : threads) thread.join();
  collect();
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 3 * kPerThread);
  make_ref(releases).reset();
  releases->clear();
  EXPECT_TRUE(releases->take().empty());
}

}  // namespace
}  // namespace smp::pipeline
