// Messages whose tensors travel over lanes, through a mailbox.

#include "csrc/mailbox/lane_posts.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/comm/run_ranks.h"
#include "tests/cpp/mailbox/lane_rank.h"
#include "tests/cpp/shm/local_memory.h"

namespace smp::mailbox {
namespace {

using lanes::FakeOptions;
using memory::MarkedTensor;

constexpr int kNumNumbered = 200;
constexpr int kNumLanes = 173;  // of their tensors
constexpr int kNumLarge = 40;   // of these

class LanePostsOver : public ::testing::TestWithParam<bool> {
 protected:
  static void run(std::optional<FakeOptions> fake,
                  const std::function<void(int, LaneRank&)>& body) {
    std::vector<shm::SharedMemoryPtr> memories(2);
    if (GetParam()) memories = shm::make_local_shared_memory(2, 50'000);
    comm::run_ranks(2, [&](int self, const comm::CommunicatorPtr& world) {
      LaneRank rank(self, world, fake, std::exchange(memories[self], nullptr));
      body(self, rank);
    });
  }
};

// With and without tensors, small ones and some larger than the ring, some of
// which find no slot.
void exchange_numbered(int self, LaneRank& rank) {
  for (int i = 0; i < kNumNumbered; ++i) {
    std::vector<MessageTensor> tensors;
    if (i % 3 != 0) tensors.push_back({.data = filled(i)});
    if (i % 5 == 0) tensors.push_back({.data = filled(-i, 9000)});
    std::vector<at::Tensor> kept;
    for (const MessageTensor& tensor : tensors) {
      kept.push_back(tensor.data);
    }
    rank.mailbox.post(1 - self, with_tensors(i, std::move(tensors)));
    for (at::Tensor& tensor : kept) tensor.fill_(12345);
  }
  const auto messages = rank.wait_for(kNumNumbered);
  for (int i = 0; i < kNumNumbered; ++i) {
    EXPECT_EQ(messages[i].fields[0], i);
    size_t next = 0;
    const auto expect = [&](const at::Tensor& expected) {
      MessageTensor tensor = messages[i].tensors.at(next++);
      EXPECT_EQ(tensor.lane, nullptr);
      EXPECT_TRUE(
          at::equal(MarkedTensor{tensor.data, tensor.mark}.use(), expected))
          << i;
    };
    if (i % 3 != 0) expect(filled(i));
    if (i % 5 == 0) expect(filled(-i, 9000));
  }
  const auto counters = rank.mailbox.stats().lanes;
  EXPECT_EQ(counters.tensors_sent, kNumLanes);
  EXPECT_EQ(counters.tensors_received, counters.tensors_sent);
  EXPECT_GT(counters.times_full, 0);
  EXPECT_LT(counters.times_full, counters.tensors_sent);
  EXPECT_FALSE(rank.board->fault()) << rank.board->fault()->describe();
}

TEST_P(LanePostsOver, messages_keep_their_order_and_their_numbers) {
  FakeOptions options{
      .seed = 5, .max_us = 300, .num_slots = 3, .slot_bytes = 60'000};
  const auto exchange = [&] {
    run(options, [&](int self, LaneRank& rank) {
      exchange_numbered(self, rank);
      const auto counters = rank.mailbox.stats().lanes;
      EXPECT_EQ(counters.times_too_large, options.has_ring ? kNumLarge : 0);
      EXPECT_EQ(rank.mailbox.lanes().empty(),
                !options.has_ring && !options.has_meeting);
    });
  };
  exchange();
  options.has_late_takes = true;
  exchange();
  options.has_late_takes = false;
  options.has_ring = true;
  exchange();
  options.has_ring = false;
  options.has_meeting = true;
  exchange();
}

// A message that waited for its copy would wait for the receiver, which asks
// for its part when the message has come.
TEST_P(LanePostsOver, a_message_leaves_before_a_copy_that_needs_both_ranks) {
  run(FakeOptions{.num_slots = 1, .has_meeting = true},
      [](int self, LaneRank& rank) {
        for (int i = 0; self == 0 && i < 20; ++i) {
          rank.mailbox.post(1, with_tensors(i, {{.data = filled(i)}}));
        }
        if (self == 0) {
          EXPECT_LT(rank.mailbox.stats().lanes.times_full, 20);
        } else {
          const auto messages = rank.wait_for(20);
          for (int i = 0; i < 20; ++i) {
            const MessageTensor& tensor = messages[i].tensors.at(0);
            EXPECT_TRUE(at::equal(MarkedTensor{tensor.data, tensor.mark}.use(),
                                  filled(i)));
          }
        }
      });
}

TEST_P(LanePostsOver, what_lanes_carry_is_recorded_on_both_sides) {
  run(FakeOptions{.seed = 5, .max_us = 3000, .num_slots = 16},
      [](int self, LaneRank& rank) {
        const auto log = rank.mailbox.lane_copies();
        ASSERT_TRUE(log);
        rank.mailbox.post(1 - self, with_tensors(0, {{.data = filled(1)}}));
        rank.wait_for(1);
        rank.mailbox.post(1 - self, with_tensors(1));  // both have come so far
        rank.wait_for(2);
        log->start(100, nullptr);
        rank.mailbox.post(1 - self, with_tensors(2));  // both record
        rank.wait_for(3);
        for (int i = 0; i < 6; ++i) {
          rank.mailbox.post(1 - self,
                            with_tensors(i, {{.data = filled(i, 100 + i)}}));
        }
        for (const Message& message : rank.wait_for(9)) {
          for (const MessageTensor& tensor : message.tensors) {
            MarkedTensor{tensor.data, tensor.mark}.use();
          }
        }
        log->stop();
        const auto recording = log->take();
        std::vector<int64_t> sent;
        std::vector<int64_t> received;
        bool takes_time = false;
        for (const lanes::LaneCopy& copy : recording.copies) {
          EXPECT_EQ(copy.peer, 1 - self);
          EXPECT_LE(copy.begin_ns, copy.end_ns);
          EXPECT_EQ(copy.uncertainty_ns, 0);
          takes_time |= copy.end_ns - copy.begin_ns > 200'000;
          (copy.is_sent ? sent : received).push_back(copy.num_bytes);
        }
        const std::vector<int64_t> expected{800, 808, 816, 824, 832, 840};
        EXPECT_EQ(sent, expected);
        EXPECT_EQ(received, expected);
        EXPECT_TRUE(takes_time) << "a copy ends when it was asked for";
        rank.mailbox.post(1 - self, with_tensors(8));  // neither records
        rank.wait_for(10);
        rank.mailbox.post(1 - self, with_tensors(9, {{.data = filled(9)}}));
        rank.wait_for(11);
        EXPECT_TRUE(log->take().copies.empty()) << "nobody records";
      });
}

TEST_P(LanePostsOver, no_post_waits_for_a_copy_and_nothing_overtakes_it) {
  run(FakeOptions{.num_slots = 2, .num_ending = 0},
      [](int self, LaneRank& rank) {
        if (self == 1) {
          // Only message 7 comes, since the first copy never ends.
          rank.wait_for(1);
          EXPECT_EQ(rank.wait_for(1)[0].fields[0], 7);
          EXPECT_EQ(rank.num_messages(), 1u);
          return;
        }
        rank.mailbox.post(1, with_tensors(7));
        rank.mailbox.post(1, with_tensors(8, {{.data = filled(1)}}));
        rank.mailbox.post(1, with_tensors(9));
        EXPECT_GE(rank.mailbox.num_unsent(), 2);
        rank.mailbox.close(std::chrono::milliseconds(50));
        EXPECT_EQ(rank.mailbox.num_unsent(), 0) << "given up";
      });
}

TEST_P(LanePostsOver, a_tensor_is_read_after_its_mark) {
  run(FakeOptions{.seed = 2, .max_us = 20'000, .num_slots = 8},
      [](int self, LaneRank& rank) {
        if (self == 0) {
          for (int i = 0; i < 8; ++i) {
            rank.mailbox.post(1, with_tensors(i, {{.data = filled(i)}}));
          }
        }
        // Sent on as they came, while they may still be nonsense.
        const auto messages = rank.wait_for(8);
        for (int i = 0; i < 8; ++i) {
          const MessageTensor& tensor = messages[i].tensors.at(0);
          if (self == 1) {
            rank.mailbox.post(
                0,
                with_tensors(i, {{.data = tensor.data, .mark = tensor.mark}}));
          } else {
            EXPECT_TRUE(at::equal(MarkedTensor{tensor.data, tensor.mark}.use(),
                                  filled(i)));
          }
        }
      });
}

TEST_P(LanePostsOver, other_channels_and_messages_to_oneself_have_no_lanes) {
  run(FakeOptions{.num_slots = 2, .num_ending = 0},
      [](int self, LaneRank& rank) {
        rank.mailbox.post(self, with_tensors(1, {{.data = filled(1)}}));
        rank.wait_for(1);
        Message message = with_tensors(2, {{.data = filled(2)}});
        message.channel = Channel::kObject;
        std::promise<void> has_come;
        rank.mailbox.set_handler(Channel::kObject, [&](Message&& object) {
          EXPECT_FALSE(object.tensors.at(0).mark);
          EXPECT_TRUE(at::equal(object.tensors.at(0).data, filled(2)));
          has_come.set_value();
        });
        rank.mailbox.post(1 - self, std::move(message));
        EXPECT_EQ(has_come.get_future().wait_for(std::chrono::seconds(20)),
                  std::future_status::ready);
        rank.mailbox.set_handler(Channel::kObject, {});
        EXPECT_EQ(rank.mailbox.stats().lanes.tensors_sent, 0);
      });
}

INSTANTIATE_TEST_SUITE_P(Transports, LanePostsOver, ::testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Memory" : "Communicator";
                         });

// The receipt of rank 2 ends a turn of rank 0, which else takes nothing more.
TEST(LanePosts, a_rank_that_closes_still_sends_what_it_has_posted) {
  const FakeOptions fake{.num_slots = 1, .has_meeting = true};
  comm::run_ranks(
      3,
      [&](int self, const comm::CommunicatorPtr& world) {
        LaneRank rank(self, world, fake);
        const auto post_to_first = [&] {
          rank.mailbox.post(0, with_tensors(self, {{.data = filled(self)}}));
        };
        if (self == 2) {
          post_to_first();
          return;
        }
        if (self == 1) {
          rank.wait_for(1);
          post_to_first();
          return;
        }
        const auto expect_tensor = [&](const Message& message) {
          const MessageTensor& tensor = message.tensors.at(0);
          EXPECT_TRUE(
              at::equal(MarkedTensor{tensor.data, tensor.mark}.use(),
                        filled(static_cast<double>(message.fields[0]))));
        };
        expect_tensor(rank.wait_for(1).at(0));
        rank.mailbox.post(1, with_tensors(0));
        expect_tensor(rank.wait_for(2).at(1));
      },
      std::chrono::seconds(150));
}

TEST(LanePosts, a_rank_without_lanes_says_so) {
  comm::run_ranks(2, [&](int self, const comm::CommunicatorPtr& world) {
    std::optional<FakeOptions> fake;
    if (self == 0) fake = FakeOptions{.num_slots = 2};
    LaneRank rank(self, world, fake);
    if (self == 0) {
      rank.mailbox.post(1, with_tensors(1, {{.data = filled(1)}}));
      while (rank.mailbox.num_unsent() > 0) std::this_thread::yield();
      return;
    }
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::seconds(120);
    while (!rank.board->fault() && std::chrono::steady_clock::now() < end) {
      std::this_thread::yield();
    }
    ASSERT_TRUE(rank.board->fault());
    const std::string text = rank.board->fault()->describe();
    EXPECT_NE(text.find("this rank has none"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace smp::mailbox
