#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/health/liveness.h"
#include "csrc/health/socket.h"
#include "tests/cpp/common/expectations.h"

namespace smp::health {

inline constexpr const char* kSecret = "a secret that only these tests know";

/// A hub and the clients of all ranks in this process.
class World {
 public:
  explicit World(int size, bool connect = true)
      : hub(std::make_unique<LivenessHub>(
            size, kLoopback, kSecret,
            LivenessHub::Options{.deadlock_after =
                                     std::chrono::milliseconds(400)})),
        boards(size),
        clients(size) {
    for (int rank = 0; rank < size; ++rank) {
      boards[rank] = std::make_shared<FaultBoard>(rank);
      if (connect) this->connect(rank);
    }
  }

  void connect(int rank) {
    clients[rank] = std::make_unique<LivenessClient>(
        "127.0.0.1", hub->port(), kSecret, rank, boards[rank],
        LivenessClient::Options{.status_every = std::chrono::milliseconds(50)});
  }

  std::optional<Fault> fault_at(int rank) {
    becomes_true([&] { return boards[rank]->fault().has_value(); });
    return boards[rank]->fault();
  }

  void leave_all() {
    for (auto& client : clients) {
      if (client) client->leave();
    }
  }

  std::unique_ptr<LivenessHub> hub;
  std::vector<std::shared_ptr<FaultBoard>> boards;
  std::vector<std::unique_ptr<LivenessClient>> clients;
};

}  // namespace smp::health
