#include <poll.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/health/file_meter.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/handshake.h"
#include "csrc/health/liveness.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/process_words.h"
#include "csrc/health/rank_set.h"
#include "csrc/health/socket.h"
#include "csrc/health/thread_name.h"
#include "csrc/health/transport_meter.h"

namespace smp::health {
namespace {

using Clock = std::chrono::steady_clock;
using Type = LivenessFrame::Type;
using std::chrono::milliseconds;

constexpr int kHubRank = 0;
constexpr milliseconds kFlushTimeout{2000};
constexpr milliseconds kPollSlice{200};
// So many ranks watch the hub; two, because one may be stopped with rank 0.
constexpr int kNumWatchers = 2;
// Between two looks: this process was stopped.
constexpr milliseconds kPause{3000};
constexpr milliseconds kBeforeInterrupt{1000};

}  // namespace

struct LivenessClient::Impl {
  Impl(std::shared_ptr<FaultBoard> faults, int global_rank, Options options)
      : faults(std::move(faults)), global_rank(global_rank), options(options) {}

  void connect(const std::string& host, int port, const std::string& secret);
  std::optional<LivenessFrame> read_welcome(Handshake& handshake);
  void await_welcome(Handshake handshake, const std::string& address);
  void start();
  void run();
  void serve();
  LivenessFrame make_status(const WaitRegistry::Snapshot& snapshot);
  void send_status();
  void watch_hub(const WaitRegistry::Snapshot& snapshot);
  void watch_peers(const LivenessFrame& status);
  void fail_for_hub(Clock::duration silence, const std::string& what);
  void report_stuck(const LivenessFrame& frame);
  void report_unreachable(LivenessFrame frame);
  bool is_stuck_here() const;
  void end_if_stuck(const LivenessFrame& status);
  void outlive_hub();
  bool is_watcher() const;
  void send_answer(Type type, int64_t number = 0, std::string text = {});
  void ask_who_left_before(const CollectiveId& collective);
  void handle(LivenessFrame frame);
  void take_left_before(const LivenessFrame& answer);
  void on_board_change();
  void report_raised(const std::string& where, const std::string& text);
  void leave();
  void close();

  // Queues a frame; with the lock held.
  void queue(const LivenessFrame& frame) {
    out += encode_frame(frame);
    wake.wake();
  }

  const std::shared_ptr<FaultBoard> faults;
  const int global_rank;
  const Options options;
  const ForkGuard fork_guard;
  const WakeFd wake;
  OwnedFd fd;
  // Of the thread only.
  std::string in;
  TransportMeter meter;
  FileMeter files;
  Clock::time_point looked_at = Clock::now();
  Clock::time_point heard_at = Clock::now();  // of the hub
  bool hub_is_unreachable = false;
  Clock::time_point status_sent_at;
  std::optional<Clock::time_point> blocked_since;
  Clock::time_point silence_reported_at;
  // Of this rank, from when it was found to be stuck.
  std::optional<LivenessFrame> stuck_status;
  Clock::time_point stuck_since;
  bool is_interrupted = false;

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

void LivenessClient::Impl::connect(const std::string& host, int port,
                                   const std::string& secret) {
  fd = connect_tcp(host, port, options.connect_timeout,
                   [this] { faults->check_interrupt(); });
  await_welcome(Handshake::caller(secret, kHubPurpose, global_rank),
                host + ":" + std::to_string(port));
}

// Says hello once the hub has proven itself.
std::optional<LivenessFrame> LivenessClient::Impl::read_welcome(
    Handshake& handshake) {
  if (handshake.is_proven()) return take_frame(in);
  in.erase(0, handshake.advance(in, out));
  if (handshake.is_proven()) {
    LivenessFrame hello;
    hello.type = Type::kHello;
    hello.global_rank = global_rank;
    hello.where = process_space();
    hello.progress = ::getpid();
    out += encode_frame(hello);
  }
  return std::nullopt;
}

void LivenessClient::Impl::await_welcome(Handshake handshake,
                                         const std::string& address) {
  const Clock::time_point deadline = Clock::now() + options.connect_timeout;
  while (true) {
    const bool is_open = read_available(fd, in) == IoResult::kOk;
    std::optional<LivenessFrame> frame;
    try {
      frame = read_welcome(handshake);
    } catch (const Error& error) {
      SMP_CHECK(false, "the connection to the liveness hub at ", address, ": ",
                error.what());
    }
    if (frame) {
      SMP_CHECK(frame->type == Type::kWelcome, "the liveness hub at ", address,
                " refuses global_rank ", global_rank, ": ", frame->text);
      return;
    }
    SMP_CHECK(is_open && write_available(fd, out) == IoResult::kOk,
              "the liveness hub at ", address,
              " closed the connection of global_rank ", global_rank,
              "; has rank 0 ended?");
    SMP_CHECK(Clock::now() < deadline, "the liveness hub at ", address,
              " does not answer global_rank ", global_rank);
    const int events = POLLIN | (out.empty() ? 0 : POLLOUT);
    pollfd entry{fd.get(), static_cast<short>(events), 0};
    ::poll(&entry, 1, static_cast<int>(kPollSlice.count()));
    faults->check_interrupt();
  }
}

void LivenessClient::Impl::start() {
  subscription = faults->subscribe([this] { on_board_change(); });
  on_board_change();  // a fault may be older than the connection
  faults->goodbyes().set_ask([this](const CollectiveId& collective) {
    ask_who_left_before(collective);
  });
  thread = std::thread([this] { run(); });
}

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
  // The hub ends with rank 0; rank 0 itself just closed it.
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

// Returns when the connection ends or on close().
void LivenessClient::Impl::serve() {
  Clock::time_point next_status = Clock::now();
  while (true) {
    if (Clock::now() >= next_status) {
      send_status();
      next_status = Clock::now() + options.status_every;
    }
    bool wants_to_write = false;
    {
      std::lock_guard lock(mutex);
      const IoResult result = write_available(fd, out);
      hub_is_unreachable = result == IoResult::kUnreachable;
      if (result != IoResult::kOk) return;
      wants_to_write = !out.empty();
      if (!wants_to_write) changed.notify_all();
      if (stopping) return;
    }
    std::array<pollfd, 2> entries = {
        pollfd{fd.get(),
               static_cast<short>(POLLIN | (wants_to_write ? POLLOUT : 0)), 0},
        pollfd{wake.get(), POLLIN, 0}};
    const auto pause = std::chrono::duration_cast<milliseconds>(
        next_status - Clock::now() + milliseconds(1));
    ::poll(entries.data(), entries.size(),
           static_cast<int>(std::max(pause, milliseconds(0)).count()));
    if (entries[1].revents != 0) wake.clear();
    const IoResult result = read_available(fd, in);
    while (auto frame = take_frame(in)) {
      heard_at = Clock::now();
      handle(std::move(*frame));
    }
    hub_is_unreachable = result == IoResult::kUnreachable;
    if (result != IoResult::kOk) return;
  }
}

LivenessFrame LivenessClient::Impl::make_status(
    const WaitRegistry::Snapshot& snapshot) {
  LivenessFrame status;
  status.type = Type::kStatus;
  status.global_rank = global_rank;
  status.is_blocked = snapshot.is_blocked;
  status.blocked_ms = snapshot.blocked_for.count();
  status.progress = snapshot.progress;
  if (snapshot.is_blocked) {
    status.progress += meter.look();
    // What the network has lost comes again; until then nobody is stuck.
    status.num_unsent += meter.num_lost();
    status.collectives =
        faults->waits().collectives().state(snapshot.collective).encode();
  } else {
    status.progress += files.look();
  }
  status.device_waits = snapshot.device_waits;
  status.num_unsent = snapshot.num_unsent;
  status.where = faults->coordinates(global_rank);
  status.text = snapshot.is_blocked ? snapshot.what : snapshot.activity;
  return status;
}

void LivenessClient::Impl::send_status() {
  const WaitRegistry::Snapshot snapshot = faults->waits().snapshot();
  const LivenessFrame status = make_status(snapshot);
  watch_hub(snapshot);
  watch_peers(status);
  end_if_stuck(status);
  const Clock::time_point now = Clock::now();
  if (now - heard_at > kQuietAfter && now - status_sent_at < kQuietEvery) {
    return;
  }
  status_sent_at = now;
  std::lock_guard lock(mutex);
  if (!leaving) queue(status);
}

// The hub looks after all ranks, and cannot tell that its own is stopped.
void LivenessClient::Impl::watch_hub(const WaitRegistry::Snapshot& snapshot) {
  const Clock::time_point now = Clock::now();
  const Clock::duration pause = now - std::exchange(looked_at, now);
  if (pause > std::max(kPause, 3 * options.status_every)) {
    heard_at += pause;  // nobody could be heard meanwhile
  }
  if (!snapshot.is_blocked || faults->fault()) return blocked_since.reset();
  if (!blocked_since) blocked_since = now;
  const Clock::time_point since =
      std::max({heard_at, *blocked_since, silence_reported_at});
  if (options.hang_after == milliseconds(0)) return;
  if (options.hang_raises && now - heard_at >= 2 * options.hang_after) {
    return fail_for_hub(now - heard_at, snapshot.what);
  }
  if (now - since < options.hang_after || !is_watcher()) return;
  silence_reported_at = now;
  const std::string coordinates = faults->coordinates(kHubRank);
  log_line(LogLevel::kWarning,
           "nothing has moved for " + seconds_text(options.hang_after) +
               " (SMP_HANG_S) and global_rank " + std::to_string(kHubRank) +
               (coordinates.empty() ? "" : " (" + coordinates + ")") +
               " HAS SAID NOTHING for " + seconds_text(now - heard_at) +
               " (stopped, or cut off); this rank waits in " + snapshot.what +
               (options.stacks
                    ? "\nPython stacks of this rank:\n" + options.stacks->take()
                    : std::string()));
}

// The hub may reach the host of a rank that this one does not reach.
void LivenessClient::Impl::watch_peers(const LivenessFrame& status) {
  if (!status.is_blocked || faults->fault()) return;
  const std::optional<std::string> address = meter.unreachable();
  const int rank = address ? faults->rank_at(*address) : -1;
  if (rank < 0 || rank == global_rank) return;
  const std::string own = faults->coordinates(global_rank);
  faults->report({.kind = Fault::Kind::kUnreachable,
                  .global_rank = rank,
                  .text = unreachable_text() + ", as seen by global_rank " +
                          std::to_string(global_rank) +
                          (own.empty() ? "" : " (" + own + ")"),
                  .is_found_here = true});
}

// Who does not reach this rank is as far away from here; a fault of this rank
// would be one that it raises itself.
void LivenessClient::Impl::report_unreachable(LivenessFrame frame) {
  const int named = static_cast<int>(frame.progress);
  const bool is_this = named == global_rank;
  faults->report({.kind = Fault::Kind::kUnreachable,
                  .global_rank = is_this ? frame.global_rank : named,
                  .text = is_this ? "it gets nothing from the host of this rank"
                                  : std::move(frame.text)});
}

// Each rank finds that by itself, when it waits: nobody can tell the others.
void LivenessClient::Impl::fail_for_hub(Clock::duration silence,
                                        const std::string& what) {
  faults->report({.kind = Fault::Kind::kStuck,
                  .global_rank = kHubRank,
                  .text = "it has said nothing for " + seconds_text(silence) +
                          " (stopped, or cut off) while this rank waits in " +
                          what + " (SMP_HANG_S, SMP_HANG_ACTION)"});
}

void LivenessClient::Impl::report_stuck(const LivenessFrame& frame) {
  std::istringstream numbers(frame.where);
  Fault fault{.kind = Fault::Kind::kStuck, .text = frame.text};
  for (int rank = -1; numbers >> rank;) fault.stuck.push_back(rank);
  SMP_CHECK(!fault.stuck.empty(), "liveness frame of stuck ranks without one");
  fault.global_rank = fault.stuck.front();
  faults->report(std::move(fault));
}

bool LivenessClient::Impl::is_stuck_here() const {
  const std::optional<Fault> fault = faults->fault();
  return fault &&
         std::count(fault->stuck.begin(), fault->stuck.end(), global_rank) > 0;
}

// The other ranks, rank 0 among them, end before a rank that is stuck.
void LivenessClient::Impl::outlive_hub() {
  while (is_stuck_here()) {
    {
      std::lock_guard lock(mutex);
      if (stopping) return;
    }
    end_if_stuck(make_status(faults->waits().snapshot()));
    pollfd entry{wake.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(options.status_every.count()));
    if (entry.revents != 0) wake.clear();
  }
}

// A rank that is stuck does not look at the fault, and would stay behind when
// the others have ended. What it does in the end is progress, too.
void LivenessClient::Impl::end_if_stuck(const LivenessFrame& status) {
  if (!is_stuck_here()) return;
  const Clock::time_point now = Clock::now();
  if (!stuck_status || status.progress != stuck_status->progress ||
      status.is_blocked != stuck_status->is_blocked) {
    stuck_status = status;
    stuck_since = now;
  } else if (now - stuck_since >= options.exit_after) {
    log_line(LogLevel::kError,
             "this rank ends without its script, which "
             "does not come back: " +
                 faults->fault()->describe());
    options.exit_process();
  } else if (now - stuck_since >= kBeforeInterrupt && !is_interrupted) {
    is_interrupted = true;
    options.interrupt_script();
  }
}

bool LivenessClient::Impl::is_watcher() const {
  int num_before = 0;
  for (int rank = kHubRank + 1; rank < global_rank; ++rank) {
    num_before += faults->has_left(rank) ? 0 : 1;
  }
  return global_rank != kHubRank && num_before < kNumWatchers;
}

void LivenessClient::Impl::handle(LivenessFrame frame) {
  switch (frame.type) {
    case Type::kRaised:
      faults->report({.kind = Fault::Kind::kRaised,
                      .global_rank = frame.global_rank,
                      .where = std::move(frame.where),
                      .text = std::move(frame.text)});
      break;
    case Type::kDied:
      faults->report(
          {.kind = Fault::Kind::kDied, .global_rank = frame.global_rank});
      break;
    case Type::kUnreachable:
      report_unreachable(std::move(frame));
      break;
    case Type::kDeadlock:
      faults->report(
          {.kind = Fault::Kind::kDeadlock, .text = std::move(frame.text)});
      break;
    case Type::kStuck:
      report_stuck(frame);
      break;
    case Type::kLeftRanks:
      faults->mark_left(RankSet::decode(frame.text));
      break;
    case Type::kLeftBefore:
      take_left_before(frame);
      break;
    case Type::kMissed:
      faults->report({.kind = Fault::Kind::kLeft,
                      .global_rank = static_cast<int>(frame.progress),
                      .text = std::move(frame.text)});
      break;
    case Type::kAlive:
      break;
    case Type::kFreeze:
      send_answer(Type::kFrozen, options.stops ? options.stops->freeze() : 0);
      break;
    case Type::kStopAt:
      if (options.stops) options.stops->decide(frame.progress);
      break;
    case Type::kStacksAsked:
      send_answer(Type::kStacks, 0,
                  options.stacks ? options.stacks->take() : std::string());
      break;
    case Type::kRaisedSeen: {
      std::lock_guard lock(mutex);
      raised_seen = true;
      changed.notify_all();
      break;
    }
    default:
      SMP_CHECK(false, "unexpected liveness frame of type ",
                static_cast<int>(frame.type));
  }
}

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

void LivenessClient::Impl::take_left_before(const LivenessFrame& answer) {
  const auto asked = CollectiveLog::State::decode(answer.collectives);
  SMP_CHECK(asked.waits_for, "liveness frame about a collective without one");
  faults->goodbyes().on_answer(*asked.waits_for,
                               static_cast<int>(answer.progress));
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
  faults->goodbyes().set_ask(nullptr);
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

LivenessClient::LivenessClient(const std::string& host, int port,
                               std::string secret, int global_rank,
                               std::shared_ptr<FaultBoard> faults,
                               Options options)
    : impl_(std::make_unique<Impl>(std::move(faults), global_rank, options)) {
  impl_->connect(host, port, secret);
  impl_->start();
}

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
