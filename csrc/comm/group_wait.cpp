#include "csrc/comm/group_wait.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <thread>

#include "csrc/comm/threaded_work.h"
#include "csrc/common/check.h"
#include "csrc/health/fault_aware_wait.h"
#include "csrc/health/wait_registry.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kGroupSlice(100);

// The text of a wait, put together only when it is read.
struct WaitText {
  std::string_view what;
  const Communicator* group = nullptr;
  const std::string* group_words = nullptr;  // instead of the group

  std::string str() const {
    if (group_words != nullptr) {
      return detail::concat(what, " over ", *group_words);
    }
    return detail::concat(what, " over ", group->name(), " (", group->size(),
                          " ranks)");
  }
};

// A wait and the reasons to end it early.
class WatchedWait {
 public:
  WatchedWait(const Work& work, const WaitOptions& wait, WaitText text)
      : work_(work), wait_(wait), text_(text) {}

  // Checks the board between two slices of the wait.
  void check_board() {
    if (!wait_.faults) return;
    health::FaultBoard& board = *wait_.faults;
    if (!blocked_) {
      blocked_.emplace(board.waits(), text_.str(), work_.collective());
    }
    board.check_interrupt();
    board.raise_if_faulted();
    raise_if_left();
  }

  // Raises the reason of a failed operation: usually a rank is lost, and the
  // board is told soon.
  void raise_reason() {
    if (!wait_.faults) return;
    const Clock::time_point deadline = Clock::now() + wait_.grace;
    while (Clock::now() < deadline) {
      wait_.faults->raise_if_faulted();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    raise_if_left();
  }

 private:
  void raise_if_left() {
    const std::optional<int> left = left_rank();
    if (!left) return;
    if (!left_since_) left_since_ = Clock::now();
    if (Clock::now() - *left_since_ < wait_.grace) return;
    health::fail_because_left(*wait_.faults, *left, "the " + text_.str());
  }

  std::optional<int> left_rank() const {
    health::FaultBoard& board = *wait_.faults;
    if (work_.collective()) {
      return board.goodbyes().rank_left_before(*work_.collective());
    }
    const auto left =
        std::find_if(wait_.peers.begin(), wait_.peers.end(),
                     [&](int rank) { return board.has_left(rank); });
    if (left == wait_.peers.end()) return std::nullopt;
    return *left;
  }

  const Work& work_;
  const WaitOptions& wait_;
  const WaitText text_;
  std::optional<health::BlockedScope> blocked_;
  std::optional<Clock::time_point> left_since_;
};

// @param raise_late  called at the time-out
template <typename RaiseLate>
void wait_in_slices(Work& work, WatchedWait& watched,
                    std::chrono::milliseconds timeout,
                    const RaiseLate& raise_late) {
  const Clock::time_point deadline = Clock::now() + timeout;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - Clock::now());
    try {
      return work.wait(
          std::clamp(left, std::chrono::milliseconds(0), kGroupSlice));
    } catch (const Disagreement&) {
      throw;  // everybody is there, and knows
    } catch (const Error&) {
      if (work.done()) break;
    }
    watched.check_board();
    if (left <= kGroupSlice) raise_late();
  }
  try {
    work.wait(kGroupSlice);  // may have finished after its time slice
  } catch (const Disagreement&) {
    throw;
  } catch (const Error&) {
    watched.raise_reason();
    throw;
  }
}

void wait_watched(Work& work, const WaitOptions& wait,
                  const Communicator& group, std::string_view what) {
  const WaitText text{.what = what, .group = &group};
  WatchedWait watched(work, wait, text);
  const auto timeout = wait.timeout + time_by_size(work.collective());
  wait_in_slices(work, watched, timeout, [&] {
    SMP_CHECK(false, "waited ", timeout.count(), " ms for the ", text.str(),
              "; ", wait.hint);
  });
}

bool follows_on_device(Work& work, const WaitOptions& wait,
                       const Communicator& group, std::string_view what) {
  if (wait.faults) wait.faults->raise_if_faulted();
  try {
    return work.order_stream();
  } catch (const Disagreement&) {
    throw;
  } catch (const Error&) {
    WatchedWait(work, wait, {.what = what, .group = &group}).raise_reason();
    throw;
  }
}

}  // namespace

std::chrono::milliseconds time_by_size(
    const std::optional<health::CollectiveId>& collective) {
  if (!collective) return std::chrono::milliseconds(0);
  return std::chrono::milliseconds(1000 * collective->num_bytes /
                                   kSlowestBytesPerSecond);
}

void wait_within(Work& work, std::chrono::milliseconds timeout) {
  const Work::WaitContext& wait_context = work.wait_context();
  if (!wait_context.faults) return work.wait(timeout);
  WaitOptions wait;
  wait.faults = wait_context.faults;
  const WaitText text{.what = wait_context.operation,
                      .group_words = wait_context.group.get()};
  WatchedWait watched(work, wait, text);
  const auto most = std::min(timeout, kLongestWait);
  wait_in_slices(work, watched, most, [&] {
    SMP_CHECK(false, text.str(), ": timed out after ", timeout.count(), " ms");
  });
}

void wait_for(Work& work, const WaitOptions& wait, const Communicator& group,
              const char* what) {
  wait_watched(work, wait, group, what);
}

void wait_for(Work& work, const WaitOptions& wait, const Communicator& group,
              const std::string& what) {
  wait_watched(work, wait, group, what);
}

void follow(Work& work, const WaitOptions& wait, const Communicator& group,
            const char* what) {
  if (group.is_stream_ordered() && follows_on_device(work, wait, group, what)) {
    return;
  }
  wait_watched(work, wait, group, what);
}

void follow(Work& work, const WaitOptions& wait, const Communicator& group,
            const std::string& what) {
  follow(work, wait, group, what.c_str());
}

}  // namespace smp::comm
