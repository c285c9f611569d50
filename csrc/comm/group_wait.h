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

/// Slowest network; a slower one counts as broken.
inline constexpr int64_t kSlowestBytesPerSecond = 1'000'000;

/// The way to wait for the operations of a group.
struct WaitOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  std::shared_ptr<health::FaultBoard> faults;  ///< ends waits; may be null
  std::vector<int> peers;  ///< global ranks of the group; empty: unknown
  /// Time for news of a fault or goodbye, which may arrive after connections
  /// break.
  std::chrono::milliseconds grace = std::chrono::seconds(2);
  /// End of a time-out's text: a question that leads to the reason.
  std::string hint =
      "did every rank call the step function, and equally often?";
};

/// Waits for an operation. A large collective gets more time than
/// `wait.timeout`: its bytes at `kSlowestBytesPerSecond`.
/// @param what  words for the error, for instance "reduction of bucket 3"
/// @throws PeerFailure on a fault or when a peer has left; Error when the
///         operation fails or `wait.timeout` passes
void wait_for(Work& work, const WaitOptions& wait, const Communicator& group,
              const char* what);
void wait_for(Work& work, const WaitOptions& wait, const Communicator& group,
              const std::string& what);

/// Lets later work on the current stream of the device use the result. The host
/// waits only if the operation is not a device's. FlightWatch watches the end
/// of device operations. May be called again.
/// @throws PeerFailure when there is a fault; otherwise as `wait_for`
void follow(Work& work, const WaitOptions& wait, const Communicator& group,
            const char* what);
void follow(Work& work, const WaitOptions& wait, const Communicator& group,
            const std::string& what);

/// Waits for code outside of the library: until the operation has finished, no
/// longer than `timeout`, whatever its size. If the work has a board
/// (`Work::wait_context`), a fault of any rank and a left rank of a collective
/// end the wait as in `wait_for`.
/// @throws PeerFailure; or the errors of `Work::wait`
void wait_within(Work& work, std::chrono::milliseconds timeout);

/// Returns the time a collective may take for its bytes beyond a time-out.
/// Holds for any group size and a slow network; 0 without a collective.
std::chrono::milliseconds time_by_size(
    const std::optional<health::CollectiveId>& collective);

}  // namespace smp::comm
