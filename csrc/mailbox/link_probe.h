#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/health/fault_board.h"
#include "csrc/mailbox/mailbox.h"

namespace smp::mailbox {

/// Measures the way to another rank by messages that come back. Each rank that
/// measures or is measured has one; a mailbox has one at a time.
class LinkProbe {
 public:
  struct Sample {
    /// Time from `post` here to the handler there. Valid between ranks of one
    /// machine only, which share a clock.
    int64_t one_way_ns = 0;
    /// Time from `post` here to the handler of the answer here, or, for a
    /// tensor of a device, until its data are here.
    int64_t round_trip_ns = 0;
  };

  LinkProbe(std::shared_ptr<Mailbox> mailbox,
            std::shared_ptr<health::FaultBoard> faults);
  ~LinkProbe();

  /// Sends tensors of `num_bytes` there and back, one after the other; over the
  /// lane of the pair, if `device` has one. One thread at a time may call.
  /// @throws PeerFailure on a fault; Error at the time-out
  std::vector<Sample> measure(int peer, int64_t num_bytes, int64_t repeats,
                              std::chrono::milliseconds timeout,
                              c10::Device device = c10::DeviceType::CPU);

 private:
  struct Answer {
    Sample sample;
    memory::Mark mark;  ///< from its end on the data are here
    int64_t posted_ns = 0;
  };

  void handle(Message&& message);
  Sample end_of(const Answer& answer) const;

  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<health::FaultBoard> faults_;
  int fault_subscription_ = -1;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Answer> answers_;
};

}  // namespace smp::mailbox
