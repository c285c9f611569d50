#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/comm/communicator.h"
#include "csrc/health/fault_board.h"

namespace smp::comm {

/// A network that is slower counts as broken.
inline constexpr int64_t kSlowestBytesPerSecond = 1'000'000;

/// How to wait for the operations of a group.
struct Patience {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::shared_ptr<health::FaultBoard> faults;  ///< ends waits; may be null
  std::vector<int> peers;  ///< global ranks of the group; empty: unknown
  /// A fault or a farewell may come later than what it does to connections.
  std::chrono::milliseconds grace = std::chrono::seconds(2);
  /// Ends the text of a time-out: a question that leads to the reason.
  std::string hint =
      "did every rank call the step function, and equally often?";
};

/// Waits for an operation. A large collective gets more time than
/// `patience.timeout`: its bytes at `kSlowestBytesPerSecond`.
/// @param what  words for the error, for instance "reduction of bucket 3"
/// @throws PeerFailure on a fault or when a peer has left; Error when the
///         operation fails or `patience.timeout` passes
void wait_for(Work& work, const Patience& patience, const Communicator& group,
              const char* what);
void wait_for(Work& work, const Patience& patience, const Communicator& group,
              const std::string& what);

/// The result may be used by what comes next on the current stream of the
/// device. The host waits only where the operation is not a device's; whether
/// one ends that is, FlightWatch watches. May be called again.
/// @throws PeerFailure when there is a fault; otherwise as `wait_for`
void follow(Work& work, const Patience& patience, const Communicator& group,
            const char* what);
void follow(Work& work, const Patience& patience, const Communicator& group,
            const std::string& what);

/// Waits as code outside of the library asks for: until the operation has
/// finished, no longer than `timeout`, whatever its size. Where somebody takes
/// care of it (`Work::care`), a fault of any rank and a rank of a collective
/// that has left end the wait as in `wait_for`.
/// @throws PeerFailure; or what `Work::wait` throws
void wait_within(Work& work, std::chrono::milliseconds timeout);

/// What a collective may take beyond a time-out for its bytes, however large
/// the group and slow the network. Without a collective nothing.
std::chrono::milliseconds time_by_size(
    const std::optional<health::CollectiveId>& collective);

}  // namespace smp::comm
