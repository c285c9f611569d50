#include "csrc/comm/threaded_work.h"

#include <algorithm>
#include <utility>

#include "csrc/common/check.h"

namespace smp::comm {

void fail_call(const CallName& call, const std::string& why) {
  throw Error(rank_prefix() + call.text() + ": " + why);
}

std::string plain_text(const std::exception& error) {
  std::string text = error.what();
  const std::string prefix = rank_prefix();
  if (text.rfind(prefix, 0) == 0) text.erase(0, prefix.size());
  return text.empty() ? "failed" : text;
}

void ThreadedWork::finish(std::string error) {
  const std::lock_guard lock(mutex_);
  if (is_over_) return;
  is_over_ = true;
  error_ = std::move(error);
  changed_.notify_all();
}

bool ThreadedWork::done() {
  const std::lock_guard lock(mutex_);
  return is_over_;
}

void ThreadedWork::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const auto end =
      std::chrono::steady_clock::now() + std::min(timeout, kLongestWait);
  if (!changed_.wait_until(lock, end, [&] { return is_over_; })) {
    fail_call(call_,
              detail::concat("timed out after ", timeout.count(), " ms"));
  }
  if (!error_.empty()) fail_call(call_, error_);
}

}  // namespace smp::comm
