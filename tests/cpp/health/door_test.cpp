#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/health/doorkeeper.h"
#include "csrc/health/handshake.h"
#include "csrc/health/liveness.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/socket.h"
#include "tests/cpp/common/expectations.h"
#include "tests/cpp/health/liveness_world.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

OwnedFd connect_to(int port) {
  return connect_tcp(kLoopback, port, seconds(5), [] {});
}

bool is_closed(const OwnedFd& fd) {
  std::string heard;
  return becomes_true(
      [&] { return read_available(fd, heard) == IoResult::kClosed; });
}

// A hub for two ranks that sends strangers away after 300 ms.
class HubWithStrangers : public testing::Test {
 protected:
  HubWithStrangers()
      : hub_(2, kLoopback, kSecret,
             {.door = {.max_half_open = 3,
                       .half_open_time = milliseconds(300),
                       .half_open_time_when_full = milliseconds(100)}}) {
    testing::internal::CaptureStderr();
    for (int rank = 0; rank < 2; ++rank) {
      boards_.push_back(std::make_shared<FaultBoard>(rank));
    }
    connect(0);
  }

  void connect(int rank) {
    clients_.push_back(std::make_unique<LivenessClient>(
        kLoopback, hub_.port(), kSecret, rank, boards_[rank],
        LivenessClient::Options{.connect_timeout = seconds(10)}));
  }

  // The job goes on: another rank comes, and is heard. Returns the log.
  std::string end_of_job() {
    connect(1);
    EXPECT_FALSE(boards_[0]->fault());
    clients_[1]->report_raised("", "still works");
    EXPECT_TRUE(becomes_true([&] { return boards_[0]->fault().has_value(); }));
    EXPECT_EQ(boards_[0]->fault()->text, "still works");
    return testing::internal::GetCapturedStderr();
  }

  LivenessHub hub_;
  std::vector<std::shared_ptr<FaultBoard>> boards_;
  std::vector<std::unique_ptr<LivenessClient>> clients_;
};

int count_of(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) {
    ++count;
  }
  return count;
}

TEST_F(HubWithStrangers, GarbageIsClosedAtOnceWithOneLineOfLog) {
  for (int i = 0; i < 5; ++i) {
    const OwnedFd stranger = connect_to(hub_.port());
    std::string noise(100'000, '\xff');
    write_available(stranger, noise);
    EXPECT_TRUE(is_closed(stranger));
  }
  const std::string log = end_of_job();
  EXPECT_EQ(count_of(log,
                     "to the liveness hub was closed: it does not begin "
                     "like a connection of this version of smp"),
            1)
      << log;
  EXPECT_EQ(count_of(log, "smp warning"), 1) << log;
}

TEST_F(HubWithStrangers, AFrameWithoutAProofIsNotRead) {
  const OwnedFd stranger = connect_to(hub_.port());
  LivenessFrame hello;
  hello.type = LivenessFrame::Type::kHello;
  hello.global_rank = 1;
  std::string bytes = encode_frame(hello);
  write_available(stranger, bytes);
  EXPECT_TRUE(is_closed(stranger));
  end_of_job();
}

TEST_F(HubWithStrangers, SilentOnesAreClosedAndHinderNobody) {
  std::vector<OwnedFd> strangers;
  for (int i = 0; i < 20; ++i) strangers.push_back(connect_to(hub_.port()));
  const std::string log = end_of_job();  // behind all of them
  for (const OwnedFd& stranger : strangers) EXPECT_TRUE(is_closed(stranger));
  EXPECT_EQ(count_of(log, "it has not proven in time"), 1) << log;
}

TEST_F(HubWithStrangers, AnOldAnswerOpensNothing) {
  // Makes the answer of a right client, which was heard on its way.
  auto heard = Handshake::caller(kSecret, kHubPurpose, 1);
  auto before = Handshake::listener(kSecret, kHubPurpose);
  std::string opening;
  std::string challenge;
  std::string answer;
  heard.advance("", opening);
  before.advance(opening, challenge);
  heard.advance(challenge, answer);
  const OwnedFd stranger = connect_to(hub_.port());
  std::string replayed = opening;
  write_available(stranger, replayed);
  std::string said;
  ASSERT_TRUE(becomes_true([&] {
    read_available(stranger, said);
    return said.size() == 64;
  }));
  LivenessFrame hello;
  hello.type = LivenessFrame::Type::kHello;
  hello.global_rank = 1;
  replayed = answer + encode_frame(hello);
  write_available(stranger, replayed);
  EXPECT_TRUE(is_closed(stranger));
  const std::string log = end_of_job();
  EXPECT_EQ(count_of(log, "it does not know the secret of this job"), 1) << log;
}

TEST_F(HubWithStrangers, AClientWithAnotherSecretIsTold) {
  const std::string error = error_of([&] {
    LivenessClient(kLoopback, hub_.port(), std::string(32, 'x'), 1, boards_[1],
                   {.connect_timeout = seconds(5)});
  });
  EXPECT_NE(error.find("the connection to the liveness hub at 127.0.0.1:"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("does not know the secret of this job"),
            std::string::npos)
      << error;
  end_of_job();
}

TEST_F(HubWithStrangers, ARankIsTheOneThatItHasProvenToBe) {
  const OwnedFd fd = connect_to(hub_.port());
  auto handshake = Handshake::caller(kSecret, kHubPurpose, 1);
  std::string in;
  std::string out;
  ASSERT_TRUE(becomes_true([&] {
    read_available(fd, in);
    in.erase(0, handshake.advance(in, out));
    if (!handshake.is_proven()) write_available(fd, out);
    return handshake.is_proven();
  }));
  LivenessFrame hello;
  hello.type = LivenessFrame::Type::kHello;
  hello.global_rank = 0;
  out += encode_frame(hello);
  write_available(fd, out);
  EXPECT_TRUE(is_closed(fd));
  end_of_job();
}

// The next descriptor of this process is one too many.
class NoDescriptors {
 public:
  NoDescriptors() {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const int next = ::dup(0);
    ::close(next);
    rlimit none = before_;
    none.rlim_cur = static_cast<rlim_t>(next);
    ::setrlimit(RLIMIT_NOFILE, &none);
  }
  ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(Doorkeeper, LooksAwayWhileThereAreNoDescriptors) {
  const Listener listener = listen_tcp(kLoopback);
  const OwnedFd caller = connect_to(listener.port);
  Doorkeeper door("a test", {});
  testing::internal::CaptureStderr();
  {
    const NoDescriptors none;
    EXPECT_FALSE(door.accept(listener.fd));
    EXPECT_FALSE(door.is_open()) << "it would be asked again at once, for ever";
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("a test cannot accept a connection now"),
            std::string::npos)
      << log;
  door.retry_accept();
  EXPECT_TRUE(door.accept(listener.fd));
}

TEST(Socket, ListensAtOneAddressOnly) {
  const Listener listener = listen_tcp("127.0.0.2");
  EXPECT_NO_THROW(connect_tcp("127.0.0.2", listener.port, seconds(5), [] {}));
  EXPECT_THROW(
      connect_tcp("127.0.0.1", listener.port, milliseconds(100), [] {}), Error);
}

TEST(Socket, ListensEverywhereWhenNoAddressIsGiven) {
  const Listener listener = listen_tcp("");
  EXPECT_NO_THROW(connect_tcp("127.0.0.1", listener.port, seconds(5), [] {}));
}

TEST(Socket, SaysWhereItCannotListen) {
  EXPECT_NE(error_of([] { listen_tcp("192.0.2.1"); }).find("192.0.2.1"),
            std::string::npos);
  EXPECT_NE(error_of([] { listen_tcp("a name"); }).find("no numeric address"),
            std::string::npos);
}

}  // namespace
}  // namespace smp::health
