#pragma once

#include <chrono>
#include <functional>
#include <string>

#include "csrc/health/fork_guard.h"

namespace smp::health {

/// Where the hub of a job listens, and who wants to talk to it.
struct HubAddress {
  std::string host;
  int port = 0;
  std::string secret;  ///< of the job; a hub that does not know it is refused
  int global_rank = -1;
};

/// Connects to the hub, proves that this process is of the job, says hello, and
/// waits to be welcomed.
/// @param idle  called a few times per second while waiting; may throw
/// @param rest  gets what the hub has said behind its welcome
/// @throws Error when the hub cannot be reached in time, or refuses
OwnedFd join_hub(const HubAddress& hub, std::chrono::milliseconds timeout,
                 const std::function<void()>& idle, std::string& rest);

}  // namespace smp::health
