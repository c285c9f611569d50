#include "csrc/health/socket.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>

namespace smp::health {
namespace {

TEST(ConnectionError, TellsAHostThatDoesNotAnswerFromAnEndThatIsGone) {
  for (const int error : {ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, ENETDOWN}) {
    EXPECT_EQ(connection_error(error), unreachable_text()) << error;
  }
  for (const int error : {ECONNRESET, EPIPE, ECONNREFUSED}) {
    EXPECT_EQ(connection_error(error), std::strerror(error));
  }
}

}  // namespace
}  // namespace smp::health
