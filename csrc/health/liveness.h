#pragma once

#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "csrc/health/doorkeeper.h"
#include "csrc/health/fault_board.h"
#include "csrc/health/stack_dump.h"
#include "csrc/health/stop_agreement.h"

namespace smp::health {

/// Hosted by rank 0: knows which ranks are alive and tells the others. Each
/// rank, rank 0 included, keeps one TCP connection to it. A rank whose
/// connection ends without a goodbye has died; the system closes connections of
/// a killed process at once, so nothing is polled.
///
/// It also finds deadlocks: every rank that has not left waits, has no message
/// under way, and has made no progress for `deadlock_after`; and none waits for
/// a collective that all of its ranks have entered, which goes on by itself,
/// however slow the network is. A rank that computes, or is stopped, is slow
/// and no deadlock; when others wait for it for long, that is worth a report
/// and, after twice the time, a fault (see HangWatch). That rank 0 is stopped,
/// and the hub with it, is found by the clients.
class LivenessHub {
 public:
  struct Options {
    std::chrono::milliseconds deadlock_after{5000};
    /// Reports older than this count for nothing in the search for deadlocks.
    std::chrono::milliseconds status_valid{3500};
    /// Ranks wait and nothing moves for so long: report it, with the stacks
    /// of all ranks. 0: never.
    std::chrono::milliseconds hang_after{0};
    /// After twice the time a rank that neither waits nor moves is a fault.
    bool hang_raises = false;
    /// Of ranks that have not proven who they are; all may come at once.
    DoorLimits door = {};
  };

  /// @param address  where to listen: numeric, of this host; empty: everywhere
  /// @param secret   of the job; who does not prove that he knows it is refused
  ///                 before anything else that he says is looked at (Handshake)
  LivenessHub(int world_size, const std::string& address, std::string secret,
              Options options);
  ~LivenessHub();  // calls close()

  int port() const;

  /// Waits up to `linger` for all ranks to leave, then closes all connections
  /// and joins the thread. Clients take that as the death of rank 0 unless
  /// rank 0 has left. May be called twice.
  void close(std::chrono::milliseconds linger = std::chrono::milliseconds(0));

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One rank's connection to the hub. What the hub says goes to the
/// FaultBoard; an exception of this rank that is reported to the board (by
/// anybody) goes to the hub and so to all other ranks.
class LivenessClient {
 public:
  struct Options {
    std::chrono::milliseconds status_every{1000};
    std::chrono::milliseconds connect_timeout{60000};
    /// Where this rank stops when any rank asks to; without one it never does.
    std::shared_ptr<StopAgreement> stops = nullptr;
    /// What the client's thread does first, for instance to have the device of
    /// this rank: it tells those who subscribe to the FaultBoard.
    std::function<void()> begin_thread = [] {};
    /// Without one it has no stacks to show.
    std::optional<StackDump> stacks = std::nullopt;
    /// This rank waits and the hub has said nothing for so long: report it,
    /// with the stacks of this rank. 0: never.
    std::chrono::milliseconds hang_after{0};
    /// After twice the time the silence of the hub is a fault.
    bool hang_raises = false;
    /// Makes the script raise; called when this rank is the one that is stuck
    /// and the fault alone has changed nothing for a second.
    std::function<void()> interrupt_script = [] {};
    /// Called when that has changed nothing for so long either.
    std::chrono::milliseconds exit_after{10000};
    std::function<void()> exit_process = [] { ::_exit(1); };
  };

  /// Connects and waits to be welcomed.
  /// @param secret  of the job; a hub that does not know it is not talked to
  /// @throws Error when the hub cannot be reached, or refuses
  LivenessClient(const std::string& host, int port, std::string secret,
                 int global_rank, std::shared_ptr<FaultBoard> faults,
                 Options options);
  ~LivenessClient();  // calls close()

  /// Puts an exception of this rank on the board and returns when the hub has
  /// told the other ranks, or could not for two seconds. Does nothing when
  /// there is a fault already.
  void report_raised(const std::string& where, const std::string& text);

  /// Asks all ranks to stop at one boundary (see StopAgreement). Returns at
  /// once; may be called on several ranks, and again.
  void request_stop();

  /// Says goodbye: from now on the end of this process is no fault.
  void leave();

  /// Ends the connection and joins the thread; without `leave` before, this
  /// rank counts as dead. May be called twice.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp::health
