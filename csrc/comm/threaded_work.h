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

/// Stands for "no time-out" where a clock would overflow with more.
inline constexpr std::chrono::milliseconds kLongestWait =
    std::chrono::hours(24 * 365);

/// Throws Error: the call, and why it failed.
[[noreturn]] void fail_call(const CallName& call, const std::string& why);

/// The text of an error without the prefix of this rank, to be told by another
/// one.
std::string plain_text(const std::exception& error);

/// A collective that threads of its group carry out. One that is aborted is
/// over for those who wait, and goes on in the group.
class ThreadedWork final : public Work {
 public:
  explicit ThreadedWork(CallName call) : call_(std::move(call)) {}

  /// It is over; only the first call counts. Any thread.
  /// @param error  empty: it has succeeded
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
