#include "csrc/health/own_status.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/socket.h"
#include "tests/cpp/common/expectations.h"

namespace smp::health {
namespace {

// A port of this host that answers no caller: its queue is full.
class DeafPort {
 public:
  DeafPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const place = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(fd_.get(), place, length), 0);
    EXPECT_EQ(::listen(fd_.get(), 0), 0);
    EXPECT_EQ(::getsockname(fd_.get(), place, &length), 0);
    port_ = ntohs(address.sin_port);
    for (int i = 0; i < 4; ++i) call();
  }

  void call() { callers_.push_back(begin_connect_tcp(kLoopback, port_)); }

 private:
  const OwnedFd fd_;
  int port_ = 0;
  std::vector<OwnedFd> callers_;
};

TEST(OwnStatus, WhatTheNetworkHasLostIsOnItsWay) {
  const auto board = std::make_shared<FaultBoard>(0);
  OwnStatus status(board);
  BlockedScope waits(board->waits(), "a message");
  EXPECT_EQ(status.make(board->waits().snapshot()).num_unsent, 0);
  DeafPort port;
  EXPECT_TRUE(becomes_true([&] {
    return status.make(board->waits().snapshot()).num_unsent > 0;
  })) << "a rank that waits for what comes again would count as stuck";
}

}  // namespace
}  // namespace smp::health
