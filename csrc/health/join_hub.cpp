#include "csrc/health/join_hub.h"

#include <poll.h>
#include <unistd.h>

#include <optional>

#include "csrc/common/check.h"
#include "csrc/health/handshake.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/process_words.h"
#include "csrc/health/socket.h"

namespace smp::health {
namespace {

using Clock = std::chrono::steady_clock;
using Type = LivenessFrame::Type;

constexpr std::chrono::milliseconds kPollSlice{200};

std::string hello_of(int global_rank) {
  LivenessFrame hello;
  hello.type = Type::kHello;
  hello.global_rank = global_rank;
  hello.where = process_space();
  hello.progress = ::getpid();
  return encode_frame(hello);
}

// Returns the welcome, if it has come. Sends hello once the hub has proven its
// identity.
std::optional<LivenessFrame> read_welcome(Handshake& handshake, std::string& in,
                                          std::string& out, int global_rank) {
  if (handshake.is_proven()) return take_frame(in);
  in.erase(0, handshake.advance(in, out));
  if (handshake.is_proven()) out += hello_of(global_rank);
  return std::nullopt;
}

}  // namespace

OwnedFd join_hub(const HubAddress& hub, std::chrono::milliseconds timeout,
                 const std::function<void()>& idle, std::string& rest) {
  const std::string address = hub.host + ":" + std::to_string(hub.port);
  OwnedFd fd = connect_tcp(hub.host, hub.port, timeout, idle);
  auto handshake = Handshake::caller(hub.secret, kHubPurpose, hub.global_rank);
  const Clock::time_point deadline = Clock::now() + timeout;
  std::string out;
  while (true) {
    const bool is_open = read_available(fd, rest) == IoResult::kOk;
    std::optional<LivenessFrame> frame;
    try {
      frame = read_welcome(handshake, rest, out, hub.global_rank);
    } catch (const Error& error) {
      SMP_CHECK(false, "the connection to the liveness hub at ", address, ": ",
                error.what());
    }
    if (frame) {
      SMP_CHECK(frame->type == Type::kWelcome, "the liveness hub at ", address,
                " refuses global_rank ", hub.global_rank, ": ", frame->text);
      return fd;
    }
    SMP_CHECK(is_open && write_available(fd, out) == IoResult::kOk,
              "the liveness hub at ", address,
              " closed the connection of global_rank ", hub.global_rank,
              "; has rank 0 ended?");
    SMP_CHECK(Clock::now() < deadline, "the liveness hub at ", address,
              " does not answer global_rank ", hub.global_rank);
    const int events = POLLIN | (out.empty() ? 0 : POLLOUT);
    pollfd entry{fd.get(), static_cast<short>(events), 0};
    ::poll(&entry, 1, static_cast<int>(kPollSlice.count()));
    idle();
  }
}

}  // namespace smp::health
