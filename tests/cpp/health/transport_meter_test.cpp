#include "csrc/health/transport_meter.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "csrc/health/socket.h"

namespace smp::health {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

// Two ends of a connection; what is written waits until it is read.
class Pair {
 public:
  Pair() : listener_(listen_tcp(kLoopback)) {
    writer = connect_tcp("127.0.0.1", listener_.port, seconds(5), [] {});
    while (!(reader = accept_tcp(listener_.fd))) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  OwnedFd writer;
  OwnedFd reader;

 private:
  const Listener listener_;
};

TEST(TransportMeter, CountsWhatWaitedAndGotThrough) {
  Pair pair;
  TransportMeter meter;
  EXPECT_EQ(meter.read(), 0);
  std::string much(64 << 20, 'x');
  write_available(pair.writer, much);  // more than the buffers hold
  ASSERT_FALSE(much.empty());
  std::this_thread::sleep_for(milliseconds(100));
  meter.read();
  EXPECT_EQ(meter.read(), meter.read()) << "nobody reads, so nothing moves";
  const int64_t before = meter.read();
  const auto until = Clock::now() + seconds(120);
  std::vector<char> arrived(64 << 10);
  while (meter.read() == before && Clock::now() < until) {
    (void)!::read(pair.reader.get(), arrived.data(), arrived.size());
    write_available(pair.writer, much);
    std::this_thread::sleep_for(milliseconds(2));
  }
  EXPECT_GT(meter.read(), before);
}

TEST(TransportMeter, TalkThatIsInStepWithTheLooksIsNoTransfer) {
  Pair pair;
  const int little = 1;  // a receiver that always has something left to take
  ASSERT_EQ(::setsockopt(pair.reader.get(), SOL_SOCKET, SO_RCVBUF, &little,
                         sizeof(little)),
            0);
  TransportMeter meter;
  std::vector<char> arrived(1 << 10);
  for (int i = 0; i < 20; ++i) {
    std::string talk(2 << 10, 'x');
    write_available(pair.writer, talk);
    (void)!::read(pair.reader.get(), arrived.data(), arrived.size());
    std::this_thread::sleep_for(milliseconds(20));
    EXPECT_EQ(meter.read(), 0);
  }
}

TEST(TransportMeter, SmallTalkIsNoTransfer) {
  Pair pair;
  TransportMeter meter;
  for (int i = 0; i < 10; ++i) {
    std::string little = "a line of somebody's log";
    write_available(pair.writer, little);
    std::this_thread::sleep_for(milliseconds(50));
    EXPECT_EQ(meter.read(), 0);
  }
}

}  // namespace
}  // namespace smp::health
