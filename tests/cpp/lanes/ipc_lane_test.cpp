#include "csrc/lanes/ipc_lane.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <deque>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "tests/cpp/lanes/ring_pair.h"

namespace smp::lanes {
namespace {

using memory::MarkedTensor;
using std::chrono::milliseconds;

constexpr milliseconds kAWhile{60};

at::Tensor ring_number(double value, int64_t size = 40) {
  return at::full({size}, value, at::kDouble);
}

double first_number(const at::Tensor& tensor) {
  return tensor.const_data_ptr<double>()[0];
}

void acknowledge_all(RingRank& from, RingRank& to, int rank_of_from) {
  for (const auto& [dst, receipt] : from.taken_receipts()) {
    to.lane.acknowledge(rank_of_from, receipt);
  }
}

// Both ways at once, with slots that are used again and again, and data that
// are read long after they came.
TEST(IpcLane, numbers_arrive_whatever_is_late) {
  constexpr int kNumTensors = 400;
  for (const uint64_t seed : {1, 2, 3}) {
    RingPair pair({.seed = seed, .max_us = 200, .num_slots = 3});
    RingRank* const ranks[] = {&pair.first, &pair.second};
    std::deque<std::pair<double, MarkedTensor>> came;
    int num_full = 0;
    const auto read_one = [&] {
      EXPECT_EQ(first_number(std::move(came.front().second).use()),
                came.front().first);
      came.pop_front();
    };
    for (int i = 0; i < kNumTensors; ++i) {
      const int src = i % 3 == 0 ? 1 : 0;
      const int dst = 1 - src;
      at::Tensor data = ring_number(i, 10 + i % 50);
      const auto posted = ranks[src]->lane.post(dst, data, false);
      data.fill_(-1);
      if (!posted) {
        ++num_full;
        acknowledge_all(*ranks[dst], *ranks[src], dst);
        continue;
      }
      EXPECT_FALSE(posted->payload.data.defined());
      came.emplace_back(i, ranks[dst]->lane.take(src, posted->descriptor, {}));
      if (came.size() > 10) read_one();
    }
    while (!came.empty()) read_one();
    EXPECT_GT(num_full, 0);
    EXPECT_LT(num_full, kNumTensors / 2);
  }
}

TEST(IpcLane, data_are_nonsense_until_their_mark_is_over) {
  RingPair pair({.num_slots = 2}, {.num_slots = 2, .num_ending = 0});
  const auto posted = pair.first.lane.post(1, ring_number(3), false);
  const auto came = pair.second.lane.take(0, posted->descriptor, {});
  std::this_thread::sleep_for(kAWhile);
  EXPECT_FALSE(came.mark.is_over());
  EXPECT_TRUE(std::isnan(first_number(came.data)));
}

TEST(IpcLane, a_post_ends_when_the_slot_is_full) {
  RingPair pair({.num_slots = 2});
  const auto posted = pair.first.lane.post(1, ring_number(3), false);
  MarkedTensor{ring_number(0), posted->end}.use();  // waits
  EXPECT_TRUE(posted->end.is_over());
  RingPair late({.num_slots = 2, .num_ending = 0});
  const auto never = late.first.lane.post(1, ring_number(3), false);
  std::this_thread::sleep_for(kAWhile);
  EXPECT_FALSE(never->end.is_over());
}

// The receipt says that the copy was asked for, not that it is over.
TEST(IpcLane, a_slot_is_written_again_after_the_copy_that_reads_it_is_over) {
  RingPair pair({.num_slots = 1}, {.num_slots = 1, .num_ending = 0});
  const auto posted = pair.first.lane.post(1, ring_number(3), false);
  EXPECT_FALSE(pair.first.lane.post(1, ring_number(4), false)) << "full";
  CopyQueue& outgoing = pair.first.lane.copies().outgoing();
  const auto written = outgoing.end();
  pair.second.lane.take(0, posted->descriptor, {});
  acknowledge_all(pair.second, pair.first, 1);
  ASSERT_TRUE(pair.first.lane.post(1, ring_number(4), false));
  const auto written_again = outgoing.end();
  std::this_thread::sleep_for(kAWhile);
  EXPECT_TRUE(written.is_over());
  EXPECT_FALSE(written_again.is_over()) << "the slot is still being read";
}

TEST(IpcLane, a_slot_that_nobody_has_read_stays_in_use) {
  RingPair pair({.num_slots = 1});
  const auto posted = pair.first.lane.post(1, ring_number(1), false);
  EXPECT_FALSE(pair.first.lane.post(1, ring_number(2), false));
  Receipt wrong{LaneKind::kIpc, posted->descriptor.slot, 7};
  EXPECT_THROW(pair.first.lane.acknowledge(1, wrong), Error);
  pair.second.lane.take(0, posted->descriptor, {});
  acknowledge_all(pair.second, pair.first, 1);
  EXPECT_TRUE(pair.first.lane.post(1, ring_number(2), false));
}

TEST(IpcLane, what_does_not_fit_or_has_no_way_is_left_to_others) {
  RingPair pair({.num_slots = 1, .slot_bytes = 320});
  EXPECT_FALSE(pair.first.lane.post(1, ring_number(1, 41), false));
  EXPECT_FALSE(pair.first.lane.post(2, ring_number(1), false));
  EXPECT_TRUE(pair.first.lane.post(1, ring_number(1, 40), false));
  pair.first.lane.use_only({});
  EXPECT_FALSE(pair.first.lane.reaches(1));
}

TEST(IpcLane, descriptors_that_cannot_be_are_refused) {
  RingPair pair({.num_slots = 2, .slot_bytes = 320});
  const Descriptor good =
      pair.first.lane.post(1, ring_number(1), false)->descriptor;
  Descriptor wrong = good;
  wrong.slot = 2;
  EXPECT_THROW(pair.second.lane.take(0, wrong, {}), Error);
  EXPECT_THROW(pair.second.lane.take(5, good, {}), Error);
  wrong = good;
  wrong.sequence = 1;
  wrong.num_bytes = 321;
  EXPECT_THROW(pair.second.lane.take(0, wrong, {}), Error);
}

TEST(IpcLane, a_fault_ends_waits_and_names_the_culprit) {
  RingPair pair({.num_slots = 1, .num_ending = 0});
  const auto posted = pair.first.lane.post(1, ring_number(1), false);
  const auto came = pair.second.lane.take(0, posted->descriptor, {});
  auto text = std::async(std::launch::async, [&]() -> std::string {
    try {
      MarkedTensor(came).use();
    } catch (const PeerFailure& failure) {
      return failure.what();
    }
    return "no failure";
  });
  EXPECT_EQ(text.wait_for(kAWhile), std::future_status::timeout);
  pair.second.board->report(
      {.kind = health::Fault::Kind::kDied, .global_rank = 3, .text = "gone"});
  EXPECT_NE(text.get().find("global_rank 3"), std::string::npos);
}

TEST(IpcLane, its_end_ends_waits_and_what_comes_later_never_comes) {
  RingPair pair({.num_slots = 2, .num_ending = 0});
  const auto first = pair.first.lane.post(1, ring_number(1), false);
  const auto second = pair.first.lane.post(1, ring_number(2), false);
  const auto came = pair.second.lane.take(0, first->descriptor, {});
  // After a fault, copies that will not end are not waited for.
  pair.second.board->report({.global_rank = 0, .text = "failed"});
  pair.second.lane.stop();
  EXPECT_THROW(MarkedTensor(came).use(), Error);
  const auto late = pair.second.lane.take(0, second->descriptor, {});
  EXPECT_THROW(MarkedTensor(late).use(), Error);
}

TEST(IpcLane, what_is_asked_for_ends_before_the_lane_does) {
  RingPair pair({.max_us = 30'000, .num_slots = 4});
  std::vector<MarkedTensor> came;
  for (int i = 0; i < 4; ++i) {
    const auto posted = pair.first.lane.post(1, ring_number(i), false);
    came.push_back(pair.second.lane.take(0, posted->descriptor, {}));
  }
  pair.second.lane.stop();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(first_number(std::move(came[i]).use()), i);
  }
}

}  // namespace
}  // namespace smp::lanes
