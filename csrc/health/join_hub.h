#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "csrc/health/fork_guard.h"

namespace smp::health {

/// The address of a job's hub and the rank that connects to it.
struct HubAddress {
  std::string host;
  int port = 0;
  std::string secret;  ///< secret of the job; a hub without it is refused
  int global_rank = -1;
};

/// Connects to the hub, proves that this process is of the job, sends hello,
/// and waits for the welcome.
/// @param idle  called a few times per second while waiting; may throw
/// @param rest  receives the bytes that the hub has sent after its welcome
/// @throws Error when the hub cannot be reached in time, or refuses
OwnedFd join_hub(const HubAddress& hub, std::chrono::milliseconds timeout,
                 const std::function<void()>& idle, std::string& rest);

}  // namespace smp::health
