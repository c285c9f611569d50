#include "csrc/lanes/nccl_lane.h"

#include <ATen/ops/add.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <deque>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "tests/cpp/lanes/meeting_pair.h"

namespace smp::lanes {
namespace {

using memory::MarkedTensor;
using std::chrono::milliseconds;

constexpr milliseconds kAMoment{60};

at::Tensor meeting_number(double value, int64_t size = 40) {
  return at::full({size}, value, at::kDouble);
}

double front_of(const at::Tensor& tensor) {
  return tensor.const_data_ptr<double>()[0];
}

void wait_until_over(const memory::Mark& mark) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(2);
  while (!mark.is_over() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  ASSERT_TRUE(mark.is_over());
}

void wait_for_end(const memory::Mark& mark) {
  MarkedTensor{meeting_number(0), mark}.use();
}

// Messages of both directions in any order against each other, headers that
// come long after the posts, data that are read long after the headers.
class ManyMessages {
 public:
  explicit ManyMessages(int seed, int num_channels)
      : random_(seed),
        pair_({.seed = static_cast<uint64_t>(seed),
               .max_us = 150,
               .num_slots = num_channels}) {}

  // Until so many took a channel; returns how many found none.
  int run(int num_messages) {
    for (int i = 0; num_sent_ < num_messages; ++i) step(i);
    for (const int dst : {0, 1}) {
      while (!headers_[dst].empty()) take(dst);
      while (!came_[dst].empty()) read(dst);
    }
    EXPECT_FALSE(pair_.first.board->fault() || pair_.second.board->fault());
    return num_refused_;
  }

 private:
  MeetingRank& rank(int rank) { return rank == 0 ? pair_.first : pair_.second; }
  void step(int number) {
    const int dst = static_cast<int>(random_() % 2);
    switch (random_() % 4) {
      case 0:
        if (!headers_[dst].empty()) take(dst);
        break;
      case 1:
        // The other end is asked for nothing during this read.
        if (came_[dst].size() > 4) read(dst);
        break;
      default:
        post(dst, number);
    }
  }
  void post(int dst, int number) {
    // Some larger than what two ends exchange at a time.
    const int64_t size = number % 11 == 0 ? 9'000 : 1 + number % 50;
    at::Tensor data = meeting_number(number, size);
    const auto posted = rank(1 - dst).post(dst, data);
    data.fill_(-1);
    if (!posted) {
      ++num_refused_;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      return;
    }
    ++num_sent_;
    EXPECT_FALSE(posted->payload.data.defined());
    wait_until_over(posted->payload.mark);
    headers_[dst].emplace_back(number, posted->descriptor);
  }
  void take(int dst) {
    // Rank 0 receives when what it sends has been asked for.
    while (dst == 0 && !headers_[1].empty()) take(1);
    const auto [number, descriptor] = headers_[dst].front();
    headers_[dst].pop_front();
    came_[dst].emplace_back(number,
                            rank(dst).lane.take(1 - dst, descriptor, {}));
  }
  void read(int dst) {
    const at::Tensor data = std::move(came_[dst].front().second).use();
    EXPECT_TRUE(at::equal(
        data, meeting_number(came_[dst].front().first, data.numel())));
    came_[dst].pop_front();
  }

  std::mt19937 random_;
  MeetingPair pair_;
  std::deque<std::pair<int, Descriptor>> headers_[2];
  std::deque<std::pair<int, MarkedTensor>> came_[2];
  int num_sent_ = 0;
  int num_refused_ = 0;
};

TEST(NcclLane, numbers_arrive_whatever_is_late) {
  for (const int seed : {1, 2, 3}) {
    for (const int num_channels : {1, 3}) {
      EXPECT_GT(ManyMessages(seed, num_channels).run(80), 0)
          << "no channel was ever in use";
    }
  }
}

TEST(NcclLane, a_copy_moves_when_both_have_asked) {
  MeetingPair pair({.num_slots = 2});
  const auto posted = pair.first.post(1, meeting_number(3));
  std::this_thread::sleep_for(kAMoment);
  EXPECT_FALSE(posted->end.is_over()) << "the receiver has not asked";
  MarkedTensor came = pair.second.lane.take(0, posted->descriptor, {});
  EXPECT_EQ(front_of(std::move(came).use()), 3);
  wait_for_end(posted->end);
}

// The message that makes the receiver ask would wait for what it asks for.
TEST(NcclLane, a_message_does_not_wait_for_its_copy) {
  MeetingPair pair({.num_slots = 1});
  const auto posted = pair.first.post(1, meeting_number(3));
  EXPECT_FALSE(posted->payload.mark);
  EXPECT_FALSE(posted->payload.data.defined());
  EXPECT_TRUE(posted->end) << "whoever records copies wants to know";
  EXPECT_FALSE(is_in_messages(posted->descriptor.lane));
  EXPECT_TRUE(pair.second.lane.take_may_block());
}

TEST(NcclLane, data_are_nonsense_until_their_mark_is_over) {
  for (const bool is_sender_late : {false, true}) {
    const FakeOptions late{.num_slots = 2, .num_ending = 0};
    const FakeOptions prompt{.num_slots = 2};
    MeetingPair pair(is_sender_late ? late : prompt,
                     is_sender_late ? prompt : late);
    const auto posted = pair.first.post(1, meeting_number(3));
    const auto came = pair.second.lane.take(0, posted->descriptor, {});
    std::this_thread::sleep_for(kAMoment);
    EXPECT_FALSE(came.mark.is_over() || posted->end.is_over());
    EXPECT_TRUE(std::isnan(front_of(came.data)));
  }
}

TEST(NcclLane, a_way_is_taken_again_when_its_copy_is_over) {
  MeetingPair pair({.num_slots = 2});
  MeetingRank& sender = pair.first;
  const auto first = sender.post(1, meeting_number(1));
  const auto second = sender.post(1, meeting_number(2));
  EXPECT_NE(first->descriptor.slot, second->descriptor.slot);
  EXPECT_FALSE(sender.post(1, meeting_number(3))) << "both are in use";
  EXPECT_TRUE(pair.second.post(0, meeting_number(4)))
      << "the other direction has its own";
  pair.second.lane.take(0, first->descriptor, {});
  wait_for_end(first->end);
  const auto third = sender.post(1, meeting_number(3));
  ASSERT_TRUE(third);
  EXPECT_EQ(third->descriptor.slot, first->descriptor.slot);
  EXPECT_EQ(third->descriptor.sequence, 2);
  EXPECT_THROW(sender.lane.acknowledge(1, {LaneKind::kNccl, 0, 0}), Error);
}

TEST(NcclLane, what_comes_out_of_order_is_refused) {
  MeetingPair pair({.num_slots = 2});
  const auto first = pair.first.post(1, meeting_number(1));
  const auto second = pair.first.post(1, meeting_number(2));
  NcclLane& receiver = pair.second.lane;
  EXPECT_THROW(receiver.take(0, second->descriptor, {}), Error);
  Descriptor wrong = first->descriptor;
  wrong.slot = 2;
  EXPECT_THROW(receiver.take(0, wrong, {}), Error);
  EXPECT_THROW(receiver.take(5, first->descriptor, {}), Error);
  EXPECT_EQ(front_of(receiver.take(0, first->descriptor, {}).use()), 1);
  EXPECT_THROW(receiver.take(0, first->descriptor, {}), Error);
}

TEST(NcclLane, ends_that_do_not_fit_are_a_fault) {
  MeetingPair pair({.num_slots = 1});
  const auto posted = pair.first.post(1, meeting_number(1, 40));
  Descriptor other = posted->descriptor;
  other.sizes = {39};
  MarkedTensor came = pair.second.lane.take(0, other, {});
  EXPECT_THROW(std::move(came).use(), PeerFailure);
  const std::string text = pair.second.board->fault()->describe();
  EXPECT_NE(text.find("312 bytes here and 320 there"), std::string::npos)
      << text;
  EXPECT_THROW(wait_for_end(posted->end), PeerFailure);
}

TEST(NcclLane, a_fault_ends_waits_and_names_the_culprit) {
  MeetingPair pair({.num_slots = 1});
  const auto posted = pair.first.post(1, meeting_number(1));
  auto text = std::async(std::launch::async, [&]() -> std::string {
    try {
      wait_for_end(posted->end);
    } catch (const PeerFailure& failure) {
      return failure.what();
    }
    return "no failure";
  });
  EXPECT_EQ(text.wait_for(kAMoment), std::future_status::timeout);
  pair.first.board->report(
      {.kind = health::Fault::Kind::kDied, .global_rank = 1, .text = "gone"});
  EXPECT_NE(text.get().find("global_rank 1"), std::string::npos);
  const auto begin = std::chrono::steady_clock::now();
  pair.first.lane.stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1))
      << "what a rank that is gone has not asked for never ends";
}

TEST(NcclLane, its_end_ends_waits_and_what_comes_later_never_comes) {
  MeetingPair pair({.num_slots = 2}, {.num_slots = 2, .num_ending = 0});
  const auto first = pair.first.post(1, meeting_number(1));
  const auto second = pair.first.post(1, meeting_number(2));
  const auto came = pair.second.lane.take(0, first->descriptor, {});
  pair.second.board->report({.global_rank = 0, .text = "failed"});
  pair.second.lane.stop();
  EXPECT_THROW(MarkedTensor(came).use(), Error);
  const auto late = pair.second.lane.take(0, second->descriptor, {});
  EXPECT_FALSE(late.mark.is_over());
  EXPECT_THROW(MarkedTensor(late).use(), Error);
  EXPECT_FALSE(pair.second.post(0, meeting_number(1)));
}

TEST(NcclLane, what_is_asked_for_ends_before_the_lane_does) {
  MeetingPair pair({.max_us = 30'000, .num_slots = 4});
  std::vector<MarkedTensor> came;
  for (int i = 0; i < 4; ++i) {
    const auto posted = pair.first.post(1, meeting_number(i));
    came.push_back(pair.second.lane.take(0, posted->descriptor, {}));
  }
  pair.second.lane.stop();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(front_of(std::move(came[i]).use()), i);
  }
}

// Takes the tensors of a rank, as the thread of arrivals does.
MarkedTensor take_at(MeetingRank& rank, int src, const Posted& posted) {
  wait_until_over(posted.payload.mark);
  return rank.lane.take(src, posted.descriptor, {});
}

// Each rank is asked for its sending first. A device that makes one copy at a
// time would then wait with it for the other device, which does the same.
TEST(NcclLane, ranks_that_send_to_each_other_need_one_copy_at_a_time) {
  MeetingPair pair({.num_slots = 2});
  for (int round = 0; round < 30; ++round) {
    const auto up = pair.first.post(1, meeting_number(round));
    const auto down = pair.second.post(0, meeting_number(-round));
    ASSERT_TRUE(up && down);
    auto at_first = std::async(std::launch::async, [&] {
      MarkedTensor came = take_at(pair.first, 1, *down);
      wait_until_over(came.mark);
      return front_of(came.data);
    });
    const MarkedTensor came = take_at(pair.second, 0, *up);
    wait_until_over(came.mark);
    EXPECT_EQ(front_of(came.data), round);
    EXPECT_EQ(at_first.get(), -round);
    wait_until_over(up->end);
    wait_until_over(down->end);
  }
}

// The allocator of each rank waits for its device, and holds the lock that the
// other rank's sending needs for the memory at its destination.
TEST(NcclLane, ranks_without_memory_left_go_on) {
  MeetingPair pair({.num_slots = 1});
  const auto up = pair.first.post(1, meeting_number(1));
  const auto down = pair.second.post(0, meeting_number(2));
  std::vector<std::future<bool>> allocators;
  for (MeetingRank* const rank : {&pair.first, &pair.second}) {
    allocators.push_back(std::async(std::launch::async, [rank] {
      return rank->device->find_memory(std::chrono::seconds(10));
    }));
  }
  std::this_thread::sleep_for(kAMoment);
  auto at_first = std::async(std::launch::async,
                             [&] { return take_at(pair.first, 1, *down); });
  MarkedTensor at_second = take_at(pair.second, 0, *up);
  for (auto& allocator : allocators) {
    EXPECT_TRUE(allocator.get()) << "the device waits for the other rank";
  }
  EXPECT_EQ(front_of(std::move(at_second).use()), 1);
  EXPECT_EQ(front_of(at_first.get().use()), 2);
}

TEST(NcclLane, tensors_of_one_message_leave_together) {
  MeetingPair pair({.num_slots = 2});
  NcclLane& sender = pair.first.lane;
  const auto back = pair.second.post(0, meeting_number(0));
  const auto first = sender.post(1, meeting_number(1), false);
  const auto second = sender.post(1, meeting_number(2), false);
  const memory::Mark turn = sender.ask_to_leave(1, 2);
  EXPECT_TRUE(turn.is_over());
  auto waiting = std::async(std::launch::async,
                            [&] { return take_at(pair.first, 1, *back); });
  EXPECT_EQ(front_of(take_at(pair.second, 0, *first).use()), 1);
  EXPECT_EQ(waiting.wait_for(kAMoment), std::future_status::timeout)
      << "the second one has not been asked for";
  EXPECT_EQ(front_of(take_at(pair.second, 0, *second).use()), 2);
  EXPECT_EQ(front_of(waiting.get().use()), 0);
}

// The other copies of a rank would wait until such a message has left.
TEST(NcclLane, a_tensor_whose_message_has_not_asked_keeps_no_turn) {
  MeetingPair pair({.num_slots = 1});
  const auto waiting = pair.first.lane.post(1, meeting_number(1), false);
  ASSERT_TRUE(waiting);
  const auto back = pair.second.post(0, meeting_number(2));
  EXPECT_EQ(front_of(take_at(pair.first, 1, *back).use()), 2);
  wait_until_over(pair.first.lane.ask_to_leave(1, 1));
  EXPECT_EQ(front_of(take_at(pair.second, 0, *waiting).use()), 1);
}

TEST(NcclLane, a_fault_ends_the_wait_for_a_turn) {
  MeetingPair pair({.num_slots = 1});
  const auto up = pair.first.post(1, meeting_number(1));
  const auto down = pair.second.post(0, meeting_number(2));
  auto text = std::async(std::launch::async, [&]() -> std::string {
    try {
      take_at(pair.first, 1, *down);
    } catch (const PeerFailure& failure) {
      return failure.what();
    }
    return "no failure";
  });
  EXPECT_EQ(text.wait_for(kAMoment), std::future_status::timeout);
  pair.first.board->report(
      {.kind = health::Fault::Kind::kDied, .global_rank = 1, .text = "gone"});
  EXPECT_NE(text.get().find("global_rank 1"), std::string::npos);
}

// The next tensor of the channel must not overtake the receipt.
TEST(NcclLane, the_receipt_of_a_sender_leaves_before_its_channel_is_free) {
  MeetingPair pair({.num_slots = 1});
  const auto posted = pair.second.post(0, meeting_number(1));
  std::promise<bool> is_free;
  pair.second.before_receipt = [&] {
    std::this_thread::sleep_for(kAMoment);
    is_free.set_value(posted->end.is_over());
  };
  EXPECT_EQ(front_of(take_at(pair.first, 1, *posted).use()), 1);
  EXPECT_FALSE(is_free.get_future().get());
  wait_until_over(posted->end);
}

TEST(NcclLane, receipts_that_are_not_expected_are_refused) {
  MeetingPair pair({.num_slots = 1});
  const auto posted = pair.first.post(1, meeting_number(1));
  NcclLane& sender = pair.first.lane;
  EXPECT_THROW(sender.acknowledge(1, {LaneKind::kNccl, 0, 1}), Error);
  EXPECT_THROW(sender.acknowledge(1, {LaneKind::kNccl, 1, 0}), Error);
  pair.second.lane.take(0, posted->descriptor, {});
  EXPECT_THROW(sender.acknowledge(1, {LaneKind::kNccl, 0, 0}), Error)
      << "twice";
}

TEST(NcclLane, ranks_that_did_not_open_each_other_have_no_way) {
  MeetingPair pair({.num_slots = 1});
  EXPECT_TRUE(pair.first.lane.reaches(1));
  EXPECT_FALSE(pair.first.post(2, meeting_number(1)));
  pair.first.lane.use_only({});
  EXPECT_FALSE(pair.first.lane.reaches(1));
  EXPECT_FALSE(pair.first.post(1, meeting_number(1)));
}

TEST(NcclLane, a_way_that_carries_nothing_is_refused_in_time) {
  const FakeOptions options{.num_slots = 1};
  MeetingRank alone(options, 0, kAMoment);
  MeetingRank other(options, 1, kAMoment);
  const std::string offer = other.lane.offer({0});
  try {
    alone.lane.open(0, 1, offer);
    FAIL() << "nobody is there";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("within 60 ms"), std::string::npos)
        << error.what();
  }
  EXPECT_THROW(alone.lane.open(0, 2, offer), Error) << "it has no such channel";
  alone.board->report({.global_rank = 1, .text = "the test is over"});
}

// Ends that were connected to the wrong place.
TEST(NcclLane, a_way_that_carries_other_numbers_is_refused) {
  class Crossed final : public MeetingCopies {
   public:
    explicit Crossed(std::unique_ptr<MeetingCopies> inner)
        : inner_(std::move(inner)) {}
    std::string offer(const std::vector<CopyChannel>& channels) override {
      return inner_->offer(channels);
    }
    void connect(const CopyChannel& channel,
                 const std::string& offer) override {
      inner_->connect(channel, offer);
    }
    memory::Mark send(const CopyChannel& channel,
                      const at::Tensor& data) override {
      return inner_->send(channel, at::add(data, 1));
    }
    MarkedTensor receive(const CopyChannel& channel, at::IntArrayRef sizes,
                         at::ScalarType dtype) override {
      return inner_->receive(channel, sizes, dtype);
    }
    void stop() override { inner_->stop(); }

   private:
    const std::unique_ptr<MeetingCopies> inner_;
  };
  const FakeOptions options{.num_slots = 1};
  const auto board = std::make_shared<health::FaultBoard>(0);
  NcclLane crossed(
      std::make_unique<Crossed>(make_fake_meeting(options, 0, board)),
      {.num_channels = 1}, c10::Device(c10::DeviceType::CPU), 0, board,
      [](int, const Receipt&) {});
  MeetingRank receiver(options, 1);
  const std::string offer = receiver.lane.offer({0});
  auto sending =
      std::async(std::launch::async, [&] { crossed.open(0, 1, offer); });
  try {
    receiver.lane.open(0, 1, "");
    FAIL() << "other numbers";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("other numbers"),
              std::string::npos);
  }
  sending.get();
}

}  // namespace
}  // namespace smp::lanes
