#pragma once

#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "csrc/lanes/nccl_lane.h"
#include "tests/cpp/lanes/fake_meeting.h"

namespace smp::lanes {

/// A rank with channels, without messages; receipts are passed to `other`.
struct MeetingRank {
  MeetingRank(FakeOptions options, int the_rank,
              std::chrono::milliseconds timeout = std::chrono::seconds(20))
      : lane(make_fake_meeting(options, the_rank, board, device),
             {.num_channels = options.num_slots, .timeout = timeout},
             c10::Device(c10::DeviceType::CPU), the_rank, board,
             [this, the_rank](int /*dst*/, const Receipt& receipt) {
               if (before_receipt) before_receipt();
               if (other != nullptr) other->acknowledge(the_rank, receipt);
             }) {}

  /// Posts a tensor as one message, which may leave when the mark of the
  /// payload is over.
  std::optional<Posted> post(int dst, const at::Tensor& data) {
    auto posted = lane.post(dst, data, false);
    if (posted) posted->payload.mark = lane.ask_to_leave(dst, 1);
    return posted;
  }

  std::shared_ptr<FakeDevice> device = std::make_shared<FakeDevice>();
  NcclLane* other = nullptr;
  std::function<void()> before_receipt = {};
  std::shared_ptr<health::FaultBoard> board =
      std::make_shared<health::FaultBoard>(1);
  NcclLane lane;
};

/// Ranks 0 and 1, which have opened each other.
struct MeetingPair {
  MeetingPair(FakeOptions options_of_0, FakeOptions options_of_1)
      : first(options_of_0, 0), second(options_of_1, 1) {
    first.other = &second.lane;
    second.other = &first.lane;
    const std::string of_first = first.lane.offer({1});
    const std::string of_second = second.lane.offer({0});
    auto other = std::async(std::launch::async, [&] {
      second.lane.open(0, 1, of_first);
      second.lane.open(1, 0, of_first);
    });
    first.lane.open(0, 1, of_second);
    first.lane.open(1, 0, of_second);
    other.get();
  }
  explicit MeetingPair(FakeOptions options) : MeetingPair(options, options) {}
  /// Ends waits for copies that do not end.
  ~MeetingPair() {
    for (MeetingRank* const rank : {&first, &second}) {
      rank->board->report({.global_rank = 0, .text = "the test is over"});
    }
    first.lane.stop();  // both while the other one still takes receipts
    second.lane.stop();
  }

  MeetingRank first;
  MeetingRank second;
};

}  // namespace smp::lanes
