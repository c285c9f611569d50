#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "csrc/health/handshake.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/rank_set.h"
#include "csrc/health/socket.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/health/liveness_world.h"

namespace smp::health {

/// A connection to a hub that says what a test wants, and keeps what it hears.
class RawRank {
 public:
  /// Proves that it is this rank, and says hello.
  RawRank(int port, int global_rank)
      : rank_(global_rank),
        fd_(connect_tcp(kLoopback, port, std::chrono::seconds(10), [] {})) {
    auto handshake = Handshake::caller(kSecret, kHubPurpose, global_rank);
    becomes_true([&] {
      read_available(fd_, in_);
      in_.erase(0, handshake.advance(in_, out_));
      write_available(fd_, out_);
      return handshake.is_proven();
    });
    say(LivenessFrame::Type::kHello);
  }

  void say(LivenessFrame frame) {
    frame.global_rank = rank_;
    out_ += encode_frame(frame);
    becomes_true([&] {
      write_available(fd_, out_);
      return out_.empty();
    });
  }
  void say(LivenessFrame::Type type) {
    LivenessFrame frame;
    frame.type = type;
    say(frame);
  }

  /// All frames but those that only say that the hub lives.
  const std::vector<LivenessFrame>& heard() {
    read_available(fd_, in_);
    while (auto frame = take_frame(in_)) {
      if (frame->type != LivenessFrame::Type::kAlive) {
        heard_.push_back(std::move(*frame));
      }
    }
    return heard_;
  }

  int num_heard(LivenessFrame::Type type) {
    int count = 0;
    for (const LivenessFrame& frame : heard()) count += frame.type == type;
    return count;
  }

  bool hears(LivenessFrame::Type type, int count = 1) {
    return becomes_true([&] { return num_heard(type) >= count; });
  }

  /// Returns the ranks that have left, as this rank has been told.
  std::vector<int> told_left() {
    RankSet told;
    for (const LivenessFrame& frame : heard()) {
      if (frame.type != LivenessFrame::Type::kLeftRanks) continue;
      for (const int rank : RankSet::decode(frame.text).ranks()) told.add(rank);
    }
    return told.ranks();
  }

  void end() { fd_.reset(); }

 private:
  const int rank_;
  OwnedFd fd_;
  std::string in_;
  std::string out_;
  std::vector<LivenessFrame> heard_;
};

}  // namespace smp::health
