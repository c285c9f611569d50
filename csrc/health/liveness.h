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

/// Watches which ranks are alive and informs the others; hosted by rank 0. Each
/// rank, rank 0 included, keeps one TCP connection to it. A rank whose
/// connection ends without a goodbye has died. The system closes the
/// connections of a killed process at once, so the hub does not poll.
///
/// It also finds deadlocks: every rank that has not left waits, has no message
/// under way, and has made no progress for `deadlock_after`. In a deadlock no
/// rank waits for a collective that all of its ranks have entered, because such
/// a collective goes on by itself, however slow the network is. A rank that
/// computes, or is stopped, is slow and no deadlock. When others wait for it
/// for long, the hub reports it and, after twice the time, makes it a fault
/// (see HangWatch). The clients notice when rank 0, and the hub with it, is
/// stopped.
class LivenessHub {
 public:
  struct Options {
    std::chrono::milliseconds deadlock_after{5000};
    /// Longest age of reports used in the search for deadlocks.
    std::chrono::milliseconds status_valid{3500};
    /// Time for which ranks wait and nothing moves before a report with the
    /// stacks of all ranks. 0: never.
    std::chrono::milliseconds hang_after{0};
    /// A rank that neither waits nor moves is a fault after twice the time.
    bool hang_raises = false;
    /// Limits of connections that have not proven their rank; all ranks may
    /// come at once.
    DoorLimits door = {};
  };

  /// @param address  numeric address of this host to listen at; empty: all
  /// @param secret   secret of the job; a process that does not prove that it
  ///                 has it is refused before its frames are read (Handshake)
  LivenessHub(int world_size, const std::string& address, std::string secret,
              Options options);
  ~LivenessHub();  // calls close()

  int port() const;

  /// Waits up to `linger` for all ranks to leave, then closes all connections
  /// and joins the thread. Clients take this for the death of rank 0 unless
  /// rank 0 has left. May be called twice.
  void close(std::chrono::milliseconds linger = std::chrono::milliseconds(0));

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// One rank's connection to the hub. It puts news from the hub on the
/// FaultBoard. It sends an exception of this rank that any code reports to the
/// board to the hub, and so to all other ranks.
class LivenessClient {
 public:
  struct Options {
    std::chrono::milliseconds status_every{1000};
    std::chrono::milliseconds connect_timeout{60000};
    /// The boundary where this rank stops when any rank asks for it; without an
    /// agreement it never stops.
    std::shared_ptr<StopAgreement> stops = nullptr;
    /// Called first in the client's thread, for instance to select the device
    /// of this rank. This thread calls the subscribers of the FaultBoard.
    std::function<void()> begin_thread = [] {};
    /// The source of stacks; nothing: there are no stacks to show.
    std::optional<StackDump> stacks = std::nullopt;
    /// Silence of the hub, while this rank waits, before a report with the
    /// stacks of this rank. 0: never.
    std::chrono::milliseconds hang_after{0};
    /// The silence of the hub is a fault after twice the time.
    bool hang_raises = false;
    /// Makes the script raise. Called when this rank is stuck and the fault
    /// alone has changed nothing for a second.
    std::function<void()> interrupt_script = [] {};
    /// Time after the interrupt before `exit_process` is called, if nothing has
    /// changed.
    std::chrono::milliseconds exit_after{10000};
    std::function<void()> exit_process = [] { ::_exit(1); };
  };

  /// Connects and waits for the welcome.
  /// @param secret  secret of the job; a hub without it is refused
  /// @throws Error when the hub cannot be reached, or refuses
  LivenessClient(const std::string& host, int port, std::string secret,
                 int global_rank, std::shared_ptr<FaultBoard> faults,
                 Options options);
  ~LivenessClient();  // calls close()

  /// Puts an exception of this rank on the board. Returns when the hub has told
  /// the other ranks, or after two seconds. Does nothing when there is a fault
  /// already.
  void report_raised(const std::string& where, const std::string& text);

  /// Asks all ranks to stop at one boundary (see StopAgreement). Returns at
  /// once; may be called on several ranks, and again.
  void request_stop();

  /// Says goodbye: from now on the end of this process is no fault.
  void leave();

  /// Ends the connection and joins the thread. Without `leave` before, this
  /// rank counts as dead. May be called twice.
  void close();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace smp::health
