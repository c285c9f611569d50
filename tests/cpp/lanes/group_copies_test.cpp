#include "csrc/lanes/group_copies.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/lanes/nccl_lane.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/lanes/meeting_groups.h"
#include "tests/cpp/memory/fake_device.h"

namespace smp::lanes {
namespace {

using memory::MarkedTensor;

const c10::Device kCpu(c10::DeviceType::CPU);

at::Tensor group_number(double value, int64_t size = 7) {
  return at::full({size}, value, at::kDouble);
}

void wait_for_it(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (!condition() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_TRUE(condition());
}

// One rank with groups of tests.
struct GroupRank {
  GroupRank(MeetingRooms& rooms, int the_rank, c10::Device device = kCpu)
      : rank(the_rank),
        board(std::make_shared<health::FaultBoard>(the_rank)),
        flights(std::make_shared<comm::FlightWatch>(
            board,
            comm::FlightWatch::Options{.look_every =
                                           std::chrono::milliseconds(1)})),
        copies(make_group_copies(
            device, the_rank,
            {.make =
                 [this, &rooms](const CopyChannel& channel) {
                   group = std::make_shared<MeetingGroup>(
                       rooms.of(channel), channel.src == rank ? 0 : 1);
                   return group;
                 },
             .flights = flights},
            board)) {}

  const int rank;
  const std::shared_ptr<health::FaultBoard> board;
  const comm::FlightWatchPtr flights;
  std::shared_ptr<MeetingGroup> group;  // the last one
  std::unique_ptr<MeetingCopies> copies;
};

constexpr CopyChannel kChannel{0, 1, 0};

class GroupCopiesTest : public ::testing::Test {
 protected:
  void connect() {
    sender.copies->connect(kChannel, "");
    receiver.copies->connect(kChannel, "");
  }

  MeetingRooms rooms;
  GroupRank sender{rooms, 0};
  GroupRank receiver{rooms, 1};
};

TEST_F(GroupCopiesTest, carry_any_dtype_and_size_under_the_lane) {
  NcclLane* lanes[2];
  const auto receipts_of = [&lanes](int rank) {
    return [&lanes, rank](int dst, const Receipt& receipt) {
      lanes[dst]->acknowledge(rank, receipt);
    };
  };
  NcclLane first(std::move(sender.copies), {.num_channels = 2}, kCpu, 0,
                 sender.board, receipts_of(0));
  NcclLane second(std::move(receiver.copies), {.num_channels = 2}, kCpu, 1,
                  receiver.board, receipts_of(1));
  lanes[0] = &first;
  lanes[1] = &second;
  auto other = std::async(std::launch::async, [&] {
    second.open(0, 1, "");
    second.open(1, 0, "");
  });
  first.open(0, 1, "");
  first.open(1, 0, "");
  other.get();
  for (const at::Tensor& data :
       {group_number(3).to(at::kBFloat16), group_number(1).to(at::kBool),
        group_number(4, 1).reshape({}), group_number(5, 60'000),
        group_number(2, 6).reshape({2, 3}).t()}) {
    for (const auto& [from, to, src] :
         {std::tuple{&first, &second, 0}, std::tuple{&second, &first, 1}}) {
      const auto posted = from->post(1 - src, data, false);
      ASSERT_TRUE(posted);
      const memory::Mark turn = from->ask_to_leave(1 - src, 1);
      EXPECT_TRUE(becomes_true([&] { return turn.is_over(); }));
      const at::Tensor came = to->take(src, posted->descriptor, {}).use();
      EXPECT_EQ(came.scalar_type(), data.scalar_type());
      EXPECT_TRUE(at::equal(came, data));
    }
  }
  first.stop();  // both while the other one still takes receipts
  second.stop();
}

TEST_F(GroupCopiesTest, keep_a_tensor_until_its_copy_is_over) {
  connect();
  at::Tensor data = group_number(3);
  const auto sent = sender.copies->send(kChannel, data);
  EXPECT_FALSE(sent.is_over());
  EXPECT_GT(data.use_count(), 1u);
  MarkedTensor came = receiver.copies->receive(kChannel, {7}, at::kDouble);
  EXPECT_TRUE(at::equal(std::move(came).use(), group_number(3)));
  EXPECT_TRUE(sent.is_over());
  EXPECT_EQ(data.use_count(), 1u);
}

TEST_F(GroupCopiesTest, are_watched_until_they_are_over) {
  connect();
  const auto sent = sender.copies->send(kChannel, group_number(3));
  EXPECT_EQ(sender.flights->num_in_flight(), 1);
  receiver.copies->receive(kChannel, {7}, at::kDouble);
  wait_for_it([&] { return sender.flights->num_in_flight() == 0; });
}

TEST_F(GroupCopiesTest, end_with_a_fault_and_name_the_culprit) {
  connect();
  const auto sent = sender.copies->send(kChannel, group_number(3));
  auto text = std::async(std::launch::async, [&]() -> std::string {
    try {
      MarkedTensor{group_number(0), sent}.use();
    } catch (const PeerFailure& failure) {
      return failure.what();
    }
    return "no failure";
  });
  // While a thread waits for the copy, the watch looks at it and goes on.
  wait_for_it([&] { return rooms.of(kChannel)->num_waiting == 1; });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  sender.board->report(
      {.kind = health::Fault::Kind::kDied, .global_rank = 1, .text = "gone"});
  EXPECT_NE(text.get().find("global_rank 1"), std::string::npos);
  EXPECT_THROW(sender.copies->send(kChannel, group_number(3)), Error)
      << "aborted";
}

TEST_F(GroupCopiesTest, a_rank_that_has_left_is_a_fault) {
  connect();
  const auto sent = sender.copies->send(kChannel, group_number(3));
  sender.board->mark_left(1);
  wait_for_it([&] { return sender.board->fault().has_value(); });
  const std::string text = sender.board->fault()->describe();
  EXPECT_NE(text.find("send over meeting:channel"), std::string::npos) << text;
}

TEST_F(GroupCopiesTest, stop_cuts_off_what_is_in_flight_and_nothing_else) {
  connect();
  const CopyChannel other{0, 1, 1};
  sender.copies->connect(other, "");
  receiver.copies->connect(other, "");
  const auto over = sender.copies->send(kChannel, group_number(3));
  receiver.copies->receive(kChannel, {7}, at::kDouble);
  const auto cut = sender.copies->send(other, group_number(4));
  sender.copies->stop();
  EXPECT_FALSE(rooms.of(kChannel)->is_aborted);
  EXPECT_TRUE(rooms.of(other)->is_aborted);
  EXPECT_THROW((MarkedTensor{group_number(0), cut}.use()), Error)
      << "else numbers that never came would be read";
  MarkedTensor{group_number(0), over}.use();
  EXPECT_THROW(sender.copies->send(kChannel, group_number(3)), Error);
  sender.copies->stop();  // again
}

TEST_F(GroupCopiesTest, groups_that_do_not_fit_are_refused) {
  const auto refused = [&](int group_rank, bool is_stream_ordered) {
    const auto copies = make_group_copies(
        kCpu, 0,
        {.make =
             [&](const CopyChannel& channel) {
               return std::make_shared<MeetingGroup>(
                   rooms.of(channel), group_rank, is_stream_ordered);
             }},
        sender.board);
    try {
      copies->connect(kChannel, "");
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refused(0, true), "");
  EXPECT_NE(refused(1, true).find("expected rank 0"), std::string::npos);
  EXPECT_NE(refused(0, false).find("ordered by streams"), std::string::npos);
}

// A send waits for the caller's work; a receive waits for no work.
TEST(GroupCopiesStreams, sends_are_the_callers_and_receives_nobodys) {
  fake_device::reset();
  MeetingRooms rooms;
  const c10::Device device = fake_device::device(1);
  GroupRank sender(rooms, 0, device);
  GroupRank receiver(rooms, 1, device);
  sender.copies->connect(kChannel, "");
  receiver.copies->connect(kChannel, "");
  const c10::Stream caller = fake_device::new_stream(1);
  memory::DeviceScope scope{caller};
  const at::Tensor data =
      at::empty({7}, at::TensorOptions(at::kDouble).device(device));
  sender.copies->send(kChannel, data);
  sender.copies->send(kChannel, data);
  MarkedTensor first = receiver.copies->receive(kChannel, {7}, at::kDouble);
  MarkedTensor second = receiver.copies->receive(kChannel, {7}, at::kDouble);
  EXPECT_EQ(first.data.device(), device);
  const std::vector<c10::StreamId> callers(2, caller.id());
  EXPECT_EQ(sender.group->streams, callers);
  ASSERT_EQ(receiver.group->streams.size(), 2u);
  EXPECT_EQ(receiver.group->streams[0], receiver.group->streams[1]);
  EXPECT_NE(receiver.group->streams[0], caller.id());
  EXPECT_NE(receiver.group->streams[0], 0) << "the default stream";
  EXPECT_EQ(memory::current_stream(device)->id(), caller.id()) << "restored";
  fake_device::reset();
}

}  // namespace
}  // namespace smp::lanes
