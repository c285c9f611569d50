#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/health/collective_log.h"
#include "csrc/health/deadlock_search.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/goodbye_news.h"
#include "csrc/health/hang_watch.h"
#include "csrc/health/hub_connections.h"
#include "csrc/health/liveness.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/membership.h"
#include "csrc/health/process_words.h"
#include "csrc/health/stop_round.h"
#include "csrc/health/thread_name.h"

namespace smp::health {
namespace {

using Clock = std::chrono::steady_clock;
using Type = LivenessFrame::Type;
using std::chrono::milliseconds;

// Time between two looks at all ranks.
constexpr milliseconds kTick{250};
// Time between two turns of the thread after which the process was stopped.
constexpr milliseconds kPause{3000};
constexpr milliseconds kAliveEvery{1000};
constexpr milliseconds kTellTimeout{2000};
// Number of ranks for which a RankSet in a frame has room.
constexpr size_t kMostRanks = 8 * kMaxTextBytes;

int checked_size(int world_size) {
  SMP_CHECK_VALUE(
      world_size > 0 && static_cast<size_t>(world_size) <= kMostRanks,
      "LivenessHub: expected 1 to ", kMostRanks, " ranks, got ", world_size);
  return world_size;
}

std::string bytes_of(Type type, std::string text = {}) {
  LivenessFrame frame;
  frame.type = type;
  frame.text = std::move(text);
  return encode_frame(frame);
}

}  // namespace

// Connects the parts of the hub: gives each part the frames that come, and
// sends what the parts have to tell the ranks.
struct LivenessHub::Impl {
  Impl(int world_size, const std::string& address, std::string secret,
       Options options);

  void run();
  bool should_end();
  void take_turn();
  void look_at_all(Clock::time_point now);
  void on_come(int rank, const LivenessFrame& hello);
  void on_frame(int rank, LivenessFrame frame);
  void on_left(int rank, const LivenessFrame& frame);
  void on_lost(int rank, bool is_unreachable);
  void answer_left_before(int rank, const LivenessFrame& question);
  void tell_goodbyes(Clock::time_point now, bool is_end);
  void report_hang(Clock::time_point now);
  void settle_stop();
  void tell_those_there(const std::string& bytes);
  void tell_fault(int global_rank, LivenessFrame fault);
  milliseconds until_next(Clock::time_point now) const;
  void close(milliseconds linger);

  const ForkGuard fork_guard;
  const std::string space = process_space();

  // The members below are used by the thread only.
  Membership members;
  HubConnections connections;
  DeadlockSearch deadlocks;
  HangWatch hangs;
  StopRound stops;
  GoodbyeNews goodbyes;
  std::optional<LivenessFrame> a_fault;  // the first one, for late comers
  Clock::time_point turned_at = Clock::now();
  Clock::time_point looked_at;
  Clock::time_point alive_at;     // when the others were told last
  bool has_looked_again = false;  // since `close` was called
  bool begins_end = false;        // the next turn, which waits for nothing
  bool has_reported_hang = false;

  std::mutex mutex;
  bool stopping = false;
  Clock::time_point linger_until;
  std::mutex close_mutex;
  std::thread thread;
};

LivenessHub::Impl::Impl(int world_size, const std::string& address,
                        std::string secret, Options options)
    : members(checked_size(world_size)),
      connections(world_size, address, std::move(secret), options.door,
                  {[this](int rank) { return members.refusal(rank); },
                   [this](int rank, const LivenessFrame& hello) {
                     on_come(rank, hello);
                   },
                   [this](int rank, LivenessFrame frame) {
                     on_frame(rank, std::move(frame));
                   },
                   [this](int rank, bool is_unreachable) {
                     on_lost(rank, is_unreachable);
                   }}),
      deadlocks(members, options.deadlock_after, options.status_valid),
      hangs(world_size, options.hang_after, options.hang_raises),
      stops(members) {
  thread = std::thread([this] { run(); });
}

void LivenessHub::Impl::run() {
  name_this_thread("smp-hub");
  try {
    while (!should_end()) take_turn();
  } catch (const std::exception& error) {
    // The clients see the end of their connections, and take rank 0 for dead.
    log_line(LogLevel::kError,
             std::string("the liveness hub failed: ") + error.what());
  }
  connections.close();
}

bool LivenessHub::Impl::should_end() {
  std::lock_guard lock(mutex);
  if (!stopping) return false;
  // Frames sent before `close` are in our sockets by now. Reads them, since a
  // goodbye among them keeps the end of the hub from being a death.
  if (!std::exchange(has_looked_again, true)) {
    begins_end = true;
    return false;
  }
  const Clock::time_point now = Clock::now();
  if (!members.all_are_gone() && now < linger_until) return false;
  return !connections.has_unsent() || now >= linger_until + kTellTimeout;
}

void LivenessHub::Impl::take_turn() {
  const bool is_end = std::exchange(begins_end, false);
  connections.serve(is_end ? milliseconds(0) : until_next(Clock::now()));
  const Clock::time_point now = Clock::now();
  if (now - turned_at > kPause) hangs.on_pause(now - turned_at);
  turned_at = now;
  if (now - looked_at >= kTick) look_at_all(now);
  settle_stop();
  tell_goodbyes(now, is_end);
  // Flushed at once, so that a fault is sent before this process can end.
  connections.flush();
}

milliseconds LivenessHub::Impl::until_next(Clock::time_point now) const {
  Clock::duration next =
      std::max<Clock::duration>(looked_at + kTick - now, milliseconds(0));
  if (const auto due_in = goodbyes.due_in(now)) next = std::min(next, *due_in);
  return std::chrono::ceil<milliseconds>(next);
}

// Runs the work that takes time for each rank and is not done on each event.
void LivenessHub::Impl::look_at_all(Clock::time_point now) {
  looked_at = now;
  connections.tick();
  if (now - alive_at >= kAliveEvery) {
    alive_at = now;
    connections.send_to_listening(bytes_of(Type::kAlive));
  }
  if (!a_fault) {
    if (auto table = deadlocks.find(now)) {
      LivenessFrame deadlock;
      deadlock.type = Type::kDeadlock;
      deadlock.text = *std::move(table);
      tell_fault(-1, std::move(deadlock));
    }
  }
  report_hang(now);
}

void LivenessHub::Impl::on_come(int rank, const LivenessFrame& hello) {
  members.on_come(rank);
  deadlocks.on_come(rank, Clock::now());
  if (!space.empty() && hello.where == space) {
    hangs.on_process(rank, static_cast<int>(hello.progress));
  }
  if (!members.left().empty()) {
    connections.send(rank,
                     bytes_of(Type::kLeftRanks, members.left_ranks().encode()));
  }
  if (a_fault) connections.send(rank, encode_frame(*a_fault));
}

void LivenessHub::Impl::on_frame(int rank, LivenessFrame frame) {
  switch (frame.type) {
    case Type::kStatus: {
      const Clock::time_point now = Clock::now();
      hangs.on_status(rank, frame, now);
      return deadlocks.on_status(rank, std::move(frame), now);
    }
    case Type::kMissed:
    case Type::kUnreachable:
    case Type::kRaised:
      tell_fault(rank, std::move(frame));
      return connections.send(rank, bytes_of(Type::kRaisedSeen));
    case Type::kStopAsked:
      return stops.on_asked();
    case Type::kFrozen:
      return stops.on_frozen(rank, frame.progress);
    case Type::kStacks:
      return hangs.on_stacks(rank, frame.text, Clock::now());
    case Type::kLeft:
      return on_left(rank, frame);
    case Type::kLeftBeforeAsked:
      return answer_left_before(rank, frame);
    default:
      SMP_CHECK(false, "unexpected liveness frame of type ",
                static_cast<int>(frame.type));
  }
}

void LivenessHub::Impl::on_left(int rank, const LivenessFrame& frame) {
  members.on_left(rank,
                  {.where = deadlocks.status(rank).where,
                   .entered = CollectiveLog::State::decode(frame.collectives)});
  hangs.on_gone(rank);
  stops.on_left(rank);
  deadlocks.on_left(Clock::now());
  goodbyes.on_left(rank);
}

void LivenessHub::Impl::on_lost(int rank, bool is_unreachable) {
  if (!members.on_lost(rank)) return;
  LivenessFrame died;
  died.type = is_unreachable ? Type::kUnreachable : Type::kDied;
  died.progress = rank;
  if (is_unreachable) died.text = unreachable_text();
  tell_fault(rank, std::move(died));
}

void LivenessHub::Impl::answer_left_before(int rank,
                                           const LivenessFrame& question) {
  const auto state = CollectiveLog::State::decode(question.collectives);
  SMP_CHECK(state.waits_for, "a question for no collective");
  const std::optional<int> left = members.left_before(*state.waits_for);
  if (!left) return;
  CollectiveLog::State asked;
  asked.waits_for = CollectiveId{.group = state.waits_for->group,
                                 .sequence = state.waits_for->sequence};
  LivenessFrame answer;
  answer.type = Type::kLeftBefore;
  answer.progress = *left;
  answer.collectives = asked.encode();
  connections.send(rank, encode_frame(answer));
}

// Sends goodbyes that are due. When all have left, the ranks that left first
// wait for this news. When the hub ends, all ranks have to learn whether rank 0
// has said goodbye.
void LivenessHub::Impl::tell_goodbyes(Clock::time_point now, bool is_end) {
  const bool all_have_left = members.all_have_left();
  const auto news = goodbyes.due(now, is_end || all_have_left);
  if (is_end || (news && all_have_left)) {
    return connections.send_to_all(
        bytes_of(Type::kLeftRanks, members.left_ranks().encode()));
  }
  if (news) tell_those_there(bytes_of(Type::kLeftRanks, news->encode()));
}

void LivenessHub::Impl::report_hang(Clock::time_point now) {
  if (!a_fault) {
    if (const auto report = hangs.due_report(now)) {
      // The terminal has shown one report already.
      const bool is_repeated = std::exchange(has_reported_hang, true);
      (is_repeated ? log_details : log_line)(LogLevel::kWarning, *report);
      connections.send_to_all(bytes_of(Type::kStacksAsked));
    }
    for (const int rank : hangs.due_looks(now)) {
      connections.send(rank, bytes_of(Type::kStacksAsked));
    }
  }
  if (const auto stacks = hangs.due_stacks(now)) {
    log_details(LogLevel::kWarning, *stacks);
  }
  if (a_fault) return;
  if (const auto stuck = hangs.due_fault(now)) {
    LivenessFrame frame;
    frame.type = Type::kStuck;
    for (const int rank : stuck->global_ranks) {
      frame.where += std::to_string(rank) + " ";
    }
    frame.text = stuck->text;
    tell_fault(-1, std::move(frame));  // those that are stuck, too
  }
}

void LivenessHub::Impl::settle_stop() {
  if (a_fault) return;
  if (const auto frame = stops.due()) tell_those_there(encode_frame(*frame));
}

void LivenessHub::Impl::tell_those_there(const std::string& bytes) {
  for (int rank = 0; rank < members.world_size(); ++rank) {
    if (members.is_there(rank)) connections.send(rank, bytes);
  }
}

// Sends only the first fault. It stays on the board of each rank, and the ends
// of other ranks, which follow from it, need no news.
void LivenessHub::Impl::tell_fault(int global_rank, LivenessFrame fault) {
  if (a_fault) return;
  fault.global_rank = global_rank;  // not what the sender says of itself
  connections.send_to_all(encode_frame(fault), global_rank);
  a_fault = std::move(fault);
}

void LivenessHub::Impl::close(milliseconds linger) {
  std::lock_guard close_lock(close_mutex);
  if (!thread.joinable()) return;
  {
    std::lock_guard lock(mutex);
    stopping = true;
    linger_until = Clock::now() + linger;
  }
  connections.wake();
  thread.join();
}

LivenessHub::LivenessHub(int world_size, const std::string& address,
                         std::string secret, Options options)
    : impl_(std::make_unique<Impl>(world_size, address, std::move(secret),
                                   options)) {}

LivenessHub::~LivenessHub() {
  if (impl_->fork_guard.in_child()) {
    (void)impl_.release();  // its thread is the parent's
    return;
  }
  impl_->close(milliseconds(0));
}

int LivenessHub::port() const { return impl_->connections.port(); }

void LivenessHub::close(milliseconds linger) {
  if (!impl_->fork_guard.in_child()) impl_->close(linger);
}

}  // namespace smp::health
