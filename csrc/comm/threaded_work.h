#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/comm/communicator.h"
#include "csrc/comm/communicator_checks.h"

namespace smp::comm {

/// Replaces longer time-outs, with which a clock would overflow.
inline constexpr std::chrono::milliseconds kLongestWait =
    std::chrono::hours(24 * 365);

/// Throws an Error with the call and the reason of its failure.
[[noreturn]] void fail_call(const CallName& call, const std::string& why);

/// Returns the text of an error without the prefix of this rank, for another
/// rank to report.
std::string plain_text(const std::exception& error);

/// A collective run by threads of its group. Abort ends it for waits only; the
/// group goes on with it.
class ThreadedWork final : public Work {
 public:
  explicit ThreadedWork(CallName call) : call_(std::move(call)) {}

  /// Ends the work; only the first call counts. Any thread may call it.
  /// @param error  reason of the failure; empty: success
  void finish(std::string error);

  bool done() override;
  void wait(std::chrono::milliseconds timeout) override;
  void abort() override { finish("aborted"); }

 private:
  const CallName call_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  std::string error_;
};

}  // namespace smp::comm
