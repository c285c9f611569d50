#include "tests/cpp/lanes/fake_lane.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <future>
#include <mutex>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/lanes/lane_table.h"
#include "tests/cpp/lanes/fake_source.h"

namespace smp::lanes {
namespace {

using memory::MarkedTensor;
using std::chrono::milliseconds;

at::Tensor number(double value) { return at::full({40}, value, at::kDouble); }

double first_of(const at::Tensor& tensor) {
  return tensor.const_data_ptr<double>()[0];
}

// Two ranks without messages between them.
struct Pair {
  explicit Pair(FakeOptions options)
      : sender(options, 0, board, [](int, const Receipt&) {}),
        receiver(options, 1, board, [this](int dst, const Receipt& receipt) {
          EXPECT_EQ(dst, 0);
          std::lock_guard lock(mutex);
          receipts.push_back(receipt);
        }) {}

  std::vector<Receipt> taken_receipts() {
    std::lock_guard lock(mutex);
    return receipts;
  }

  std::shared_ptr<health::FaultBoard> board =
      std::make_shared<health::FaultBoard>(1);
  std::mutex mutex;
  std::vector<Receipt> receipts;
  FakeLane sender;
  FakeLane receiver;
};

template <typename Condition>
void wait_for(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!condition() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(1));
  }
  EXPECT_TRUE(condition());
}

TEST(FakeLane, data_are_nonsense_until_their_mark_is_over) {
  Pair pair({.num_slots = 4, .num_ending = 1});
  auto posted = pair.sender.post(1, number(3), false);
  ASSERT_TRUE(posted);
  at::Tensor payload = std::move(posted->payload).use();
  EXPECT_EQ(first_of(payload), 3);
  // The first copy of the receiver ends, the second one never does.
  MarkedTensor came = pair.receiver.take(0, posted->descriptor, payload);
  EXPECT_EQ(first_of(MarkedTensor(came).use()), 3);
  EXPECT_TRUE(came.mark.is_over());
  posted->descriptor.sequence = 1;
  came = pair.receiver.take(0, posted->descriptor, payload);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(came.mark.is_over());
  EXPECT_TRUE(std::isnan(first_of(came.data)));
}

TEST(FakeLane, the_sender_may_write_after_post) {
  Pair pair({.max_us = 20'000, .num_slots = 1});
  at::Tensor data = number(3);
  auto posted = pair.sender.post(1, data, false);
  data.fill_(4);
  EXPECT_EQ(first_of(std::move(posted->payload).use()), 3);
}

TEST(FakeLane, copies_end_in_another_order_than_they_began) {
  constexpr int kNumCopies = 60;
  Pair pair({.seed = 3, .max_us = 3000, .num_slots = kNumCopies});
  for (int i = 0; i < kNumCopies; ++i) {
    const auto posted = pair.sender.post(1, number(i), false);
    pair.receiver.take(0, posted->descriptor, number(i));
  }
  wait_for([&] { return pair.taken_receipts().size() == kNumCopies; });
  bool is_ordered = true;
  const auto receipts = pair.taken_receipts();
  for (size_t i = 0; i < receipts.size(); ++i) {
    is_ordered &= receipts[i].sequence == static_cast<int64_t>(i);
    pair.sender.acknowledge(1, receipts[i]);
  }
  EXPECT_FALSE(is_ordered);
  EXPECT_TRUE(pair.sender.post(1, number(0), false)) << "all slots are free";
}

TEST(FakeLane, a_full_ring_takes_nothing_until_a_receipt_comes) {
  Pair pair({.num_slots = 1});
  const auto posted = pair.sender.post(1, number(1), false);
  EXPECT_FALSE(pair.sender.post(1, number(2), false));
  pair.receiver.take(0, posted->descriptor, number(1));
  wait_for([&] { return pair.taken_receipts().size() == 1; });
  pair.sender.acknowledge(1, pair.taken_receipts()[0]);
  EXPECT_TRUE(pair.sender.post(1, number(2), false));
}

TEST(FakeLane, a_fault_ends_waits_and_names_the_culprit) {
  Pair pair({.num_slots = 1, .num_ending = 0});
  const auto posted = pair.sender.post(1, number(1), false);
  const MarkedTensor came =
      pair.receiver.take(0, posted->descriptor, number(1));
  auto text = std::async(std::launch::async, [&]() -> std::string {
    try {
      MarkedTensor(came).use();
    } catch (const PeerFailure& failure) {
      return failure.what();
    }
    return "no failure";
  });
  EXPECT_EQ(text.wait_for(milliseconds(50)), std::future_status::timeout);
  pair.board->report(
      {.kind = health::Fault::Kind::kDied, .global_rank = 3, .text = "gone"});
  EXPECT_NE(text.get().find("global_rank 3"), std::string::npos);
}

TEST(FakeLane, its_end_ends_waits) {
  Pair pair({.num_slots = 1, .num_ending = 0});
  const auto posted = pair.sender.post(1, number(1), false);
  const MarkedTensor came =
      pair.receiver.take(0, posted->descriptor, number(1));
  auto ended = std::async(std::launch::async, [&] {
    EXPECT_THROW(MarkedTensor(came).use(), Error);
  });
  EXPECT_EQ(ended.wait_for(milliseconds(50)), std::future_status::timeout);
  pair.receiver.stop();
  ended.get();
}

TEST(FakeLane, the_environment_is_read_or_refused) {
  const char* const variable = "SMP_TEST_LANES";
  ::unsetenv(variable);
  EXPECT_FALSE(FakeOptions::from_environment());
  ::setenv(variable, "7:300:2", 1);
  const auto options = FakeOptions::from_environment();
  ASSERT_TRUE(options);
  EXPECT_EQ(options->seed, 7u);
  EXPECT_EQ(options->max_us, 300);
  EXPECT_EQ(options->num_slots, 2);
  EXPECT_FALSE(options->has_ring);
  ::setenv(variable, "7:300:2:ring", 1);
  EXPECT_TRUE(FakeOptions::from_environment()->has_ring);
  EXPECT_FALSE(FakeOptions::from_environment()->has_meeting);
  ::setenv(variable, "7:300:2:meet", 1);
  EXPECT_FALSE(FakeOptions::from_environment()->has_ring);
  EXPECT_TRUE(FakeOptions::from_environment()->has_meeting);
  ::setenv(variable, "7:300:2:ring:meet", 1);
  EXPECT_TRUE(FakeOptions::from_environment()->has_ring);
  EXPECT_TRUE(FakeOptions::from_environment()->has_meeting);
  for (const char* wrong :
       {"7", "7:300", "7:300:0", "7:300:2:", "a:1:1", "7:-1:2", "7:99999999:2",
        "7::2", "7:300:", "7:300:2:rings", ":ring", ":meet",
        "7:300:2:meet:ring"}) {
    ::setenv(variable, wrong, 1);
    EXPECT_THROW(FakeOptions::from_environment(), ValueError) << wrong;
  }
  ::unsetenv(variable);
}

TEST(LaneTable, what_finds_no_slot_goes_through_the_host) {
  const auto board = std::make_shared<health::FaultBoard>(0);
  LaneTable table({.source = fake_source({.num_slots = 1})}, 0, board,
                  [](int, const Receipt&) {});
  ASSERT_TRUE(table.takes(number(1)));
  EXPECT_EQ(table.post(1, number(1), false).descriptor.lane, LaneKind::kFake);
  const at::Tensor data = number(2);
  Posted posted = table.post(1, data, false);
  EXPECT_EQ(posted.descriptor.lane, LaneKind::kHost);
  EXPECT_FALSE(posted.payload.data.is_alias_of(data)) << "may be written to";
  EXPECT_EQ(
      first_of(table.take(1, posted.descriptor, posted.payload.data).data), 2);
  EXPECT_TRUE(table.post(1, data, true).payload.data.is_alias_of(data));
  const LaneCounters counters = table.counters();
  EXPECT_EQ(counters.tensors_sent, 3);
  EXPECT_EQ(counters.bytes_sent, 3 * 40 * 8);
  EXPECT_EQ(counters.tensors_received, 1);
  EXPECT_EQ(counters.times_full, 2);
  table.stop();
}

TEST(LaneTable, the_cpu_has_lanes_in_tests_only) {
  EXPECT_FALSE(LaneOptions{}.has_lanes());
  EXPECT_TRUE(LaneOptions{.source = fake_source({})}.has_lanes());
  EXPECT_TRUE(
      LaneOptions{.device = c10::Device(c10::DeviceType::CUDA, 0)}.has_lanes());
}

}  // namespace
}  // namespace smp::lanes
