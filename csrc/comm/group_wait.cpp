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

// The words for a wait, put together only when they are read.
struct Words {
  std::string_view what;
  const Communicator* group = nullptr;
  const std::string* group_words = nullptr;  // instead of the group

  std::string text() const {
    if (group_words != nullptr) {
      return detail::concat(what, " over ", *group_words);
    }
    return detail::concat(what, " over ", group->name(), " (", group->size(),
                          " ranks)");
  }
};

// A wait and the reasons to end it early.
class Watch {
 public:
  Watch(const Work& work, const Patience& patience, Words words)
      : work_(work), patience_(patience), words_(words) {}

  // Checks the board between two slices of the wait.
  void look() {
    if (!patience_.faults) return;
    health::FaultBoard& board = *patience_.faults;
    if (!blocked_) {
      blocked_.emplace(board.waits(), words_.text(), work_.collective());
    }
    board.check_interrupt();
    board.raise_if_faulted();
    raise_if_left();
  }

  // Raises the reason of a failed operation: usually a rank is lost, and the
  // board is told soon.
  void explain_failure() {
    if (!patience_.faults) return;
    const Clock::time_point deadline = Clock::now() + patience_.grace;
    while (Clock::now() < deadline) {
      patience_.faults->raise_if_faulted();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    raise_if_left();
  }

 private:
  void raise_if_left() {
    const std::optional<int> left = who_left();
    if (!left) return;
    if (!left_since_) left_since_ = Clock::now();
    if (Clock::now() - *left_since_ < patience_.grace) return;
    health::fail_because_left(*patience_.faults, *left, "the " + words_.text());
  }

  std::optional<int> who_left() const {
    health::FaultBoard& board = *patience_.faults;
    if (work_.collective()) {
      return board.goodbyes().who_left_before(*work_.collective());
    }
    const auto left =
        std::find_if(patience_.peers.begin(), patience_.peers.end(),
                     [&](int rank) { return board.has_left(rank); });
    if (left == patience_.peers.end()) return std::nullopt;
    return *left;
  }

  const Work& work_;
  const Patience& patience_;
  const Words words_;
  std::optional<health::BlockedScope> blocked_;
  std::optional<Clock::time_point> left_since_;
};

// @param raise_late  called at the time-out
template <typename RaiseLate>
void wait_in_slices(Work& work, Watch& watch, std::chrono::milliseconds timeout,
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
    watch.look();
    if (left <= kGroupSlice) raise_late();
  }
  try {
    work.wait(kGroupSlice);  // may have finished after its time slice
  } catch (const Disagreement&) {
    throw;
  } catch (const Error&) {
    watch.explain_failure();
    throw;
  }
}

void wait_watched(Work& work, const Patience& patience,
                  const Communicator& group, std::string_view what) {
  const Words words{.what = what, .group = &group};
  Watch watch(work, patience, words);
  const auto timeout = patience.timeout + time_by_size(work.collective());
  wait_in_slices(work, watch, timeout, [&] {
    SMP_CHECK(false, "waited ", timeout.count(), " ms for the ", words.text(),
              "; ", patience.hint);
  });
}

bool follows_on_device(Work& work, const Patience& patience,
                       const Communicator& group, std::string_view what) {
  if (patience.faults) patience.faults->raise_if_faulted();
  try {
    return work.order_stream();
  } catch (const Disagreement&) {
    throw;
  } catch (const Error&) {
    Watch(work, patience, {.what = what, .group = &group}).explain_failure();
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
  const Work::Care& care = work.care();
  if (!care.faults) return work.wait(timeout);
  Patience patience;
  patience.faults = care.faults;
  const Words words{.what = care.operation, .group_words = care.group.get()};
  Watch watch(work, patience, words);
  const auto most = std::min(timeout, kLongestWait);
  wait_in_slices(work, watch, most, [&] {
    SMP_CHECK(false, words.text(), ": timed out after ", timeout.count(),
              " ms");
  });
}

void wait_for(Work& work, const Patience& patience, const Communicator& group,
              const char* what) {
  wait_watched(work, patience, group, what);
}

void wait_for(Work& work, const Patience& patience, const Communicator& group,
              const std::string& what) {
  wait_watched(work, patience, group, what);
}

void follow(Work& work, const Patience& patience, const Communicator& group,
            const char* what) {
  if (group.is_stream_ordered() &&
      follows_on_device(work, patience, group, what)) {
    return;
  }
  wait_watched(work, patience, group, what);
}

void follow(Work& work, const Patience& patience, const Communicator& group,
            const std::string& what) {
  follow(work, patience, group, what.c_str());
}

}  // namespace smp::comm
