#include "csrc/comm/peer_sockets.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/socket_frames.h"
#include "csrc/health/handshake.h"
#include "csrc/health/socket.h"
#include "tests/cpp/common/expectations.h"

namespace smp::comm::raw {
namespace {

using health::Handshake;
using health::IoResult;
using health::OwnedFd;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kStream = 7;
const std::string kSecret = "a secret that only these tests know";

// A receiver that lists what comes on a stream in words: "1: text", "lost 1".
class Inbox final : public PeerSockets::Receiver {
 public:
  uint8_t* begin(const PeerSockets::Frame& frame) override {
    bytes_.resize(frame.size);
    return bytes_.data();
  }
  void end(const PeerSockets::Frame& frame) override {
    add(std::to_string(frame.source_rank) + ": " +
        std::string(bytes_.begin(), bytes_.end()));
  }
  void lost(int global_rank, const std::string& why) override {
    {
      std::lock_guard lock(mutex_);
      why_ = why;
    }
    add("lost " + std::to_string(global_rank));
  }

  bool becomes(const std::vector<std::string>& expected) {
    return smp::becomes_true([&] { return events() == expected; }, seconds(5));
  }
  std::vector<std::string> events() {
    std::lock_guard lock(mutex_);
    return events_;
  }
  std::string why() {
    std::lock_guard lock(mutex_);
    return why_;
  }

 private:
  void add(std::string event) {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }

  std::vector<uint8_t> bytes_;  // of the receiving thread
  std::mutex mutex_;
  std::vector<std::string> events_;
  std::string why_;
};

// A text that another thread sets once.
class Note {
 public:
  void set(const std::string& text) {
    std::lock_guard lock(mutex_);
    text_ = text;
  }
  std::optional<std::string> get() {
    std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  std::mutex mutex_;
  std::optional<std::string> text_;
};

PeerSockets::Outgoing frame_of(const std::string& text) {
  auto owner = std::make_shared<std::string>(text);
  const auto* data = reinterpret_cast<const uint8_t*>(owner->data());
  PeerSockets::Outgoing frame;
  frame.pieces.push_back({owner, data, text.size()});
  return frame;
}

std::string bytes_of_frame(const std::string& text, uint64_t size) {
  const FrameHead head{0x46504d53, 0, kStream, 0, 0, size};
  return std::string(reinterpret_cast<const char*>(&head), sizeof(head)) + text;
}

// One end of a connection, driven step by step.
struct Wire {
  OwnedFd fd;
  Handshake handshake;
  std::string in;
  std::string out;

  // Shakes hands until `until` holds, and sends only what is wanted by then.
  bool shake(const std::function<bool()>& until) {
    return smp::becomes_true([&] {
      health::read_available(fd, in);
      in.erase(0, handshake.advance(in, out));
      if (until()) return true;
      health::write_available(fd, out);
      return false;
    });
  }
  bool prove() {
    const bool done = shake([&] { return handshake.is_proven(); });
    health::write_available(fd, out);
    return done;
  }
  void send(std::string bytes) { health::write_available(fd, bytes); }
  bool is_closed() {
    return smp::becomes_true(
        [&] { return health::read_available(fd, in) == IoResult::kClosed; });
  }
};

// Rank 0 with sockets, and rank 1 made of bytes.
class RankZero : public testing::Test {
 protected:
  RankZero() {
    testing::internal::CaptureStderr();
    sockets_.set_addresses(
        {sockets_.address(), "127.0.0.1 " + std::to_string(listener_.port)});
    sockets_.add_receiver(kStream, inbox_);
  }
  ~RankZero() override { (void)testing::internal::GetCapturedStderr(); }

  Wire connect(int as = 1, const std::string& secret = kSecret) {
    return {health::connect_tcp("127.0.0.1", port(), seconds(5), [] {}),
            Handshake::caller(secret, peer_purpose(0), as),
            {},
            {}};
  }
  int port() const {
    const std::string address = sockets_.address();
    return std::stoi(address.substr(address.find(' ')));
  }

  // The connection from rank 0, which has sent a frame.
  Wire accept() {
    sockets_.post(1, kStream, {frame_of("hello")},
                  [this](const std::string& error) { sent_.set(error); });
    OwnedFd fd;
    EXPECT_TRUE(smp::becomes_true([&] {
      fd = health::accept_tcp(listener_.fd);
      return static_cast<bool>(fd);
    }));
    return {
        std::move(fd), Handshake::listener(kSecret, peer_purpose(1)), {}, {}};
  }

  const health::Listener listener_ = health::listen_tcp(health::kLoopback);
  std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  Note sent_;
  PeerSockets sockets_{
      0,
      {.secret = kSecret,
       .door = {.max_half_open = 3,
                .half_open_time = milliseconds(400),
                .half_open_time_when_full = milliseconds(100)}}};
};

TEST_F(RankZero, GetsFramesOfWhoHasProvenItself) {
  Wire wire = connect();
  ASSERT_TRUE(wire.prove());
  wire.send(bytes_of_frame("abc", 3));
  EXPECT_TRUE(inbox_->becomes({"1: abc"}));
  EXPECT_EQ(sockets_.num_connections(), 1);
}

TEST_F(RankZero, SendsFramesToWhoHasProvenItself) {
  Wire wire = accept();
  std::this_thread::sleep_for(milliseconds(50));
  health::read_available(wire.fd, wire.in);
  EXPECT_EQ(wire.in.size(), 44U) << "more than an opening before any proof";
  EXPECT_FALSE(sent_.get());
  ASSERT_TRUE(wire.prove());
  const std::string expected = bytes_of_frame("hello", 5);
  EXPECT_TRUE(smp::becomes_true([&] {
    health::read_available(wire.fd, wire.in);
    return wire.in == expected;
  }));
  EXPECT_TRUE(smp::becomes_true([&] { return sent_.get() == ""; }));
}

TEST_F(RankZero, StrangersAreClosedAndHinderNobody) {
  std::vector<Wire> silent;
  for (int i = 0; i < 12; ++i) silent.push_back(connect());
  Wire garbage = connect();
  garbage.send(bytes_of_frame("abc", 3));
  Wire other = connect(1, std::string(32, 'x'));
  EXPECT_NE(error_of([&] { other.prove(); }), "no error");
  other.send(std::string(32, '\0') + bytes_of_frame("abc", 3));
  Wire right = connect();
  ASSERT_TRUE(right.prove());
  right.send(bytes_of_frame("right", 5));
  EXPECT_TRUE(inbox_->becomes({"1: right"}));
  EXPECT_TRUE(garbage.is_closed());
  EXPECT_TRUE(other.is_closed());
  for (Wire& one : silent) EXPECT_TRUE(one.is_closed());
  EXPECT_EQ(sockets_.num_connections(), 1);
}

TEST_F(RankZero, AnOldAnswerOpensNothing) {
  Wire first = connect();
  ASSERT_TRUE(first.shake([&] { return first.handshake.is_proven(); }));
  const std::string answer = first.out;
  Wire replay = connect();
  ASSERT_TRUE(replay.shake([&] { return replay.handshake.is_proven(); }));
  replay.send(answer + bytes_of_frame("abc", 3));
  EXPECT_TRUE(replay.is_closed());
  EXPECT_TRUE(inbox_->events().empty());
  first.send(answer + bytes_of_frame("abc", 3));
  EXPECT_TRUE(inbox_->becomes({"1: abc"}));
}

TEST_F(RankZero, ASecondConnectionOfARankIsRefused) {
  Wire first = connect();
  ASSERT_TRUE(first.prove());
  first.send(bytes_of_frame("first", 5));
  EXPECT_TRUE(inbox_->becomes({"1: first"}));
  Wire second = connect();
  ASSERT_TRUE(second.prove());
  second.send(bytes_of_frame("second", 6));
  EXPECT_TRUE(second.is_closed());
  first.send(bytes_of_frame("again", 5));
  EXPECT_TRUE(inbox_->becomes({"1: first", "1: again"}));
}

// Rank 1 has sent its last frames and ends; rank 0 sees the end of the other
// connection before it has read anything of this one.
TEST_F(RankZero, HearsTheLastFramesOfAPeerWhoseOtherConnectionHasEnded) {
  std::optional<Wire> outgoing = accept();
  ASSERT_TRUE(outgoing->prove());
  ASSERT_TRUE(smp::becomes_true([&] { return sent_.get() == ""; }));
  Wire incoming = connect();
  ASSERT_TRUE(incoming.shake([&] { return incoming.handshake.is_proven(); }));
  outgoing.reset();
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_TRUE(inbox_->events().empty());
  incoming.send(incoming.out + bytes_of_frame("last words", 10));
  incoming.fd.reset();
  EXPECT_TRUE(inbox_->becomes({"1: last words", "lost 1"}));
}

TEST_F(RankZero, AStrangerThatClaimsToBeAPeerHidesItsLossForAMomentOnly) {
  std::optional<Wire> outgoing = accept();
  ASSERT_TRUE(outgoing->prove());
  ASSERT_TRUE(smp::becomes_true([&] { return sent_.get() == ""; }));
  std::vector<Wire> strangers;
  for (int i = 0; i < 3; ++i) {  // there is always one
    strangers.push_back(connect());
    ASSERT_TRUE(strangers.back().shake(
        [&] { return strangers.back().handshake.is_proven(); }));
    if (i == 0) outgoing.reset();
    std::this_thread::sleep_for(milliseconds(250));
  }
  EXPECT_TRUE(inbox_->becomes({"lost 1"}));
}

TEST_F(RankZero, FramesOfNoSizeThatCanBeEndTheConnection) {
  Wire wire = connect();
  ASSERT_TRUE(wire.prove());
  wire.send(bytes_of_frame("", uint64_t{1} << 60));
  EXPECT_TRUE(inbox_->becomes({"lost 1"}));
  EXPECT_NE(inbox_->why().find("what global_rank 1 sends makes no sense"),
            std::string::npos)
      << inbox_->why();
}

TEST_F(RankZero, WhatIsPostedAfterTheEndFailsAtOnce) {
  sockets_.close();
  std::optional<std::string> error;
  sockets_.post(1, kStream, {frame_of("late")},
                [&](const std::string& text) { error = text; });
  EXPECT_EQ(error, "closed by this process");
}

TEST_F(RankZero, WhatWaitsForAProofFailsWhenTheListenerIsAnother) {
  Wire wire = accept();
  wire.handshake = Handshake::listener(kSecret, peer_purpose(2));
  ASSERT_TRUE(wire.shake([&] { return !wire.out.empty(); }));
  wire.send(wire.out);
  EXPECT_TRUE(smp::becomes_true([&] { return sent_.get().has_value(); }));
  EXPECT_NE(sent_.get()->find("does not know the secret of this job"),
            std::string::npos)
      << *sent_.get();
  EXPECT_TRUE(inbox_->becomes({"lost 1"}));
}

}  // namespace
}  // namespace smp::comm::raw
