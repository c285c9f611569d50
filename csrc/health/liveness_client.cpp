#include <poll.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/health/collective_log.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/hub_silence.h"
#include "csrc/health/join_hub.h"
#include "csrc/health/liveness.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/news_of_ranks.h"
#include "csrc/health/own_status.h"
#include "csrc/health/socket.h"
#include "csrc/health/stuck_exit.h"
#include "csrc/health/thread_name.h"

namespace smp::health {
namespace {

using Clock = std::chrono::steady_clock;
using Type = LivenessFrame::Type;
using std::chrono::milliseconds;

constexpr milliseconds kFlushTimeout{2000};

}  // namespace

struct LivenessClient::Impl {
  Impl(const HubAddress& hub, std::shared_ptr<FaultBoard> faults,
       Options options);

  void run();
  void serve();
  bool send_queued(bool& wants_to_write);
  bool take_received();
  void send_status();
  void outlive_hub();
  void send_answer(Type type, int64_t number = 0, std::string text = {});
  void ask_who_left_before(const CollectiveId& collective);
  void handle(LivenessFrame frame);
  void on_board_change();
  void report_raised(const std::string& where, const std::string& text);
  void leave();
  void close();

  // Queues a frame; called with the lock held.
  void queue(const LivenessFrame& frame) {
    out += encode_frame(frame);
    wake.wake();
  }

  const std::shared_ptr<FaultBoard> faults;
  const int global_rank;
  const Options options;
  const ForkGuard fork_guard;
  const WakeFd wake;
  // The members below are used by the thread only.
  std::string in;
  OwnedFd fd;
  OwnStatus own_status;
  HubSilence hub_silence;
  StuckExit stuck_exit;
  bool hub_is_unreachable = false;
  Clock::time_point status_sent_at;

  std::mutex mutex;
  std::condition_variable changed;
  std::string out;
  bool raised_sent = false;
  bool raised_seen = false;
  bool leaving = false;
  bool stopping = false;
  bool is_over = false;  // the thread does no more
  int subscription = -1;
  std::mutex close_mutex;
  std::thread thread;
};

LivenessClient::Impl::Impl(const HubAddress& hub,
                           std::shared_ptr<FaultBoard> the_faults,
                           Options the_options)
    : faults(std::move(the_faults)),
      global_rank(hub.global_rank),
      options(std::move(the_options)),
      fd(join_hub(
          hub, options.connect_timeout, [this] { faults->check_interrupt(); },
          in)),
      own_status(faults),
      hub_silence(faults, {.status_every = options.status_every,
                           .hang_after = options.hang_after,
                           .hang_raises = options.hang_raises,
                           .stacks = options.stacks}),
      stuck_exit(faults, {.interrupt_script = options.interrupt_script,
                          .exit_after = options.exit_after,
                          .exit_process = options.exit_process}) {
  subscription = faults->subscribe([this] { on_board_change(); });
  on_board_change();  // a fault may be older than the connection
  faults->goodbyes().set_send_query([this](const CollectiveId& collective) {
    ask_who_left_before(collective);
  });
  thread = std::thread([this] { run(); });
}

// ----------------------------------------------------------------- the thread

void LivenessClient::Impl::run() {
  name_this_thread("smp-liveness");
  std::string error;
  try {
    options.begin_thread();
    serve();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  bool is_expected = false;
  {
    std::lock_guard lock(mutex);
    is_over = true;
    is_expected = stopping;
  }
  changed.notify_all();
  if (!is_expected) outlive_hub();
  // The hub ends with rank 0, and on rank 0 this process has just closed it.
  if (is_expected || global_rank == kHubRank || faults->has_left(kHubRank)) {
    return;
  }
  if (hub_is_unreachable) {
    faults->report({.kind = Fault::Kind::kUnreachable,
                    .global_rank = kHubRank,
                    .text = unreachable_text()});
  }
  faults->report(
      {.kind = Fault::Kind::kDied, .global_rank = kHubRank, .text = error});
}

// Returns when the connection ends or when close() is called.
void LivenessClient::Impl::serve() {
  Clock::time_point next_status = Clock::now();
  bool wants_to_write = false;
  do {
    if (Clock::now() >= next_status) {
      send_status();
      next_status = Clock::now() + options.status_every;
    }
    if (!send_queued(wants_to_write)) return;
    std::array<pollfd, 2> entries = {
        pollfd{fd.get(),
               static_cast<short>(POLLIN | (wants_to_write ? POLLOUT : 0)), 0},
        pollfd{wake.get(), POLLIN, 0}};
    const auto pause = std::chrono::duration_cast<milliseconds>(
        next_status - Clock::now() + milliseconds(1));
    ::poll(entries.data(), entries.size(),
           static_cast<int>(std::max(pause, milliseconds(0)).count()));
    if (entries[1].revents != 0) wake.clear();
  } while (take_received());
}

// Returns whether the connection goes on.
bool LivenessClient::Impl::send_queued(bool& wants_to_write) {
  std::lock_guard lock(mutex);
  const IoResult result = write_available(fd, out);
  hub_is_unreachable = result == IoResult::kUnreachable;
  if (result != IoResult::kOk) return false;
  wants_to_write = !out.empty();
  if (!wants_to_write) changed.notify_all();
  return !stopping;
}

// Returns whether the connection goes on.
bool LivenessClient::Impl::take_received() {
  const IoResult result = read_available(fd, in);
  while (auto frame = take_frame(in)) {
    hub_silence.on_frame();
    handle(std::move(*frame));
  }
  hub_is_unreachable = result == IoResult::kUnreachable;
  return result == IoResult::kOk;
}

void LivenessClient::Impl::send_status() {
  const WaitRegistry::Snapshot snapshot = faults->waits().snapshot();
  const LivenessFrame status = own_status.make(snapshot);
  hub_silence.check(snapshot);
  own_status.watch_peers(status);
  stuck_exit.check(status);
  const Clock::time_point now = Clock::now();
  if (now - hub_silence.last_frame_at() > kQuietAfter &&
      now - status_sent_at < kQuietEvery) {
    return;
  }
  status_sent_at = now;
  std::lock_guard lock(mutex);
  if (!leaving) queue(status);
}

// Ends this rank if it is stuck: the other ranks, rank 0 included, end before
// it.
void LivenessClient::Impl::outlive_hub() {
  while (stuck_exit.is_stuck()) {
    {
      std::lock_guard lock(mutex);
      if (stopping) return;
    }
    stuck_exit.check(own_status.make(faults->waits().snapshot()));
    pollfd entry{wake.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(options.status_every.count()));
    if (entry.revents != 0) wake.clear();
  }
}

void LivenessClient::Impl::handle(LivenessFrame frame) {
  if (put_on_board(*faults, frame)) return;
  switch (frame.type) {
    case Type::kAlive:
      return;
    case Type::kFreeze:
      return send_answer(Type::kFrozen,
                         options.stops ? options.stops->freeze() : 0);
    case Type::kStopAt:
      if (options.stops) options.stops->decide(frame.progress);
      return;
    case Type::kStacksAsked:
      return send_answer(
          Type::kStacks, 0,
          options.stacks ? own_status.stacks(*options.stacks) : std::string());
    case Type::kRaisedSeen: {
      std::lock_guard lock(mutex);
      raised_seen = true;
      return changed.notify_all();
    }
    default:
      SMP_CHECK(false, "unexpected liveness frame of type ",
                static_cast<int>(frame.type));
  }
}

// -------------------------------------------------------------- other threads

void LivenessClient::Impl::send_answer(Type type, int64_t number,
                                       std::string text) {
  LivenessFrame answer;
  answer.type = type;
  answer.global_rank = global_rank;
  answer.progress = number;
  answer.text = std::move(text);
  std::lock_guard lock(mutex);
  if (!leaving) queue(answer);
}

void LivenessClient::Impl::ask_who_left_before(const CollectiveId& collective) {
  CollectiveLog::State state;
  state.waits_for = collective;
  LivenessFrame question;
  question.type = Type::kLeftBeforeAsked;
  question.global_rank = global_rank;
  question.collectives = state.encode();
  std::lock_guard lock(mutex);
  if (!leaving) queue(question);
}

void LivenessClient::Impl::on_board_change() {
  const std::optional<Fault> fault = faults->fault();
  if (!fault) return;
  const bool is_raised =
      fault->kind == Fault::Kind::kRaised && fault->global_rank == global_rank;
  if (!fault->is_found_here && !is_raised) return;
  LivenessFrame raised;
  raised.type = is_raised                                  ? Type::kRaised
                : fault->kind == Fault::Kind::kUnreachable ? Type::kUnreachable
                                                           : Type::kMissed;
  raised.global_rank = global_rank;
  raised.progress = fault->global_rank;
  raised.where = fault->where;
  raised.text = fault->text;
  std::lock_guard lock(mutex);
  if (std::exchange(raised_sent, true)) return;
  queue(raised);
}

void LivenessClient::Impl::report_raised(const std::string& where,
                                         const std::string& text) {
  faults->report({.kind = Fault::Kind::kRaised,
                  .global_rank = global_rank,
                  .where = where,
                  .text = text});
  std::unique_lock lock(mutex);
  if (!raised_sent) return;
  changed.wait_for(lock, kFlushTimeout,
                   [this] { return raised_seen || is_over; });
}

void LivenessClient::Impl::leave() {
  std::unique_lock lock(mutex);
  if (leaving || stopping) return;
  leaving = true;
  LivenessFrame left;
  left.type = Type::kLeft;
  left.global_rank = global_rank;
  left.collectives = faults->waits().collectives().state(std::nullopt).encode();
  queue(left);
  changed.wait_for(lock, kFlushTimeout,
                   [this] { return out.empty() || is_over; });
}

void LivenessClient::Impl::close() {
  std::lock_guard close_lock(close_mutex);
  if (!thread.joinable()) return;
  faults->unsubscribe(subscription);
  faults->goodbyes().set_send_query(nullptr);
  {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, kFlushTimeout,
                     [this] { return out.empty() || is_over; });
    stopping = true;
    wake.wake();
  }
  thread.join();
  fd.reset();
}

// --------------------------------------------------------------------- public

LivenessClient::LivenessClient(const std::string& host, int port,
                               std::string secret, int global_rank,
                               std::shared_ptr<FaultBoard> faults,
                               Options options)
    : impl_(std::make_unique<Impl>(HubAddress{.host = host,
                                              .port = port,
                                              .secret = std::move(secret),
                                              .global_rank = global_rank},
                                   std::move(faults), std::move(options))) {}

LivenessClient::~LivenessClient() {
  if (impl_->fork_guard.in_child()) {
    (void)impl_.release();  // its thread is the parent's
    return;
  }
  impl_->close();
}

void LivenessClient::report_raised(const std::string& where,
                                   const std::string& text) {
  impl_->fork_guard.check("the liveness client");
  impl_->report_raised(where, text);
}

void LivenessClient::request_stop() {
  impl_->fork_guard.check("the liveness client");
  impl_->send_answer(Type::kStopAsked);
}

void LivenessClient::leave() {
  impl_->fork_guard.check("the liveness client");
  impl_->leave();
}

void LivenessClient::close() {
  if (!impl_->fork_guard.in_child()) impl_->close();
}

}  // namespace smp::health
