#include <poll.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/health/collective_log.h"
#include "csrc/health/doorkeeper.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/handshake.h"
#include "csrc/health/hang_watch.h"
#include "csrc/health/liveness.h"
#include "csrc/health/liveness_frame.h"
#include "csrc/health/process_words.h"
#include "csrc/health/socket.h"
#include "csrc/health/thread_name.h"

namespace smp::health {
namespace {

using Clock = std::chrono::steady_clock;
using Type = LivenessFrame::Type;
using std::chrono::milliseconds;

constexpr milliseconds kTick{250};
// Between two ticks: the process was stopped.
constexpr milliseconds kPause{3000};
constexpr milliseconds kAliveEvery{1000};
constexpr milliseconds kTellTimeout{2000};
constexpr size_t kMaxHelloBytes = 4096;

struct Connection {
  Connection(OwnedFd fd, Handshake handshake)
      : fd(std::move(fd)), handshake(std::move(handshake)) {}

  OwnedFd fd;
  Handshake handshake;
  std::string in;
  std::string out;
  const Clock::time_point accepted = Clock::now();
  int global_rank = -1;  // -1 until a right hello
  bool is_closed = false;
  bool is_unreachable = false;  // that is why it closed

  // The newest status, and since when it is the same while waiting.
  LivenessFrame status;
  std::optional<Clock::time_point> status_at;
  Clock::time_point alive_at;  // when it was told that the hub lives

  // On the way to a stop: it was told to wait at its next boundary, which is.
  bool is_freezing = false;
  std::optional<int64_t> frozen_at;
  Clock::time_point stuck_since;

  void note(IoResult result) {
    is_closed |= result != IoResult::kOk;
    is_unreachable |= result == IoResult::kUnreachable;
  }
};

DoorLimits with_room(DoorLimits limits, int world_size) {
  limits.max_half_open += static_cast<size_t>(world_size);
  return limits;
}

std::string rank_text(int global_rank, const std::string& where) {
  return "global_rank " + std::to_string(global_rank) +
         (where.empty() ? "" : " (" + where + ")");
}

}  // namespace

struct LivenessHub::Impl {
  Impl(int world_size, const std::string& address, std::string secret,
       Options options)
      : world_size(world_size),
        secret(std::move(secret)),
        options(options),
        listener(listen_tcp(address)),
        door("the liveness hub", with_room(options.door, world_size)),
        hangs(world_size, options.hang_after, options.hang_raises) {
    thread = std::thread([this] { run(); });
  }

  void run();
  bool should_end();
  void poll_once();
  void accept_all();
  void serve(Connection& connection);
  void read(Connection& connection);
  void handle(Connection& connection, const LivenessFrame& frame);
  void handle_hello(Connection& connection, const LivenessFrame& hello);
  void handle_status(Connection& connection, const LivenessFrame& status);
  void drop_closed();
  void say_alive();
  void find_deadlock();
  bool some_collective_goes_on(
      const std::vector<const Connection*>& ranks) const;
  void report_hang();
  void settle_stop();
  std::string deadlock_table(const std::vector<const Connection*>& ranks) const;
  std::string deadlock_headline() const;
  void tell_others(int global_rank, const LivenessFrame& frame);
  void tell_fault(int global_rank, const LivenessFrame& frame);
  void close(milliseconds linger);

  const int world_size;
  const std::string secret;
  const Options options;
  const ForkGuard fork_guard;
  const Listener listener;
  Doorkeeper door;
  const WakeFd wake;
  const std::string space = process_space();

  // Of the thread only.
  std::vector<std::unique_ptr<Connection>> connections;
  std::map<int, LivenessFrame> left;  // their goodbyes
  Clock::time_point alive_at;         // when the others were told last
  Clock::time_point polled_at = Clock::now();
  std::set<int> gone;                    // left or died
  std::optional<LivenessFrame> a_fault;  // the first one, for late comers
  HangWatch hangs;
  bool stop_asked = false;
  bool stop_decided = false;

  std::mutex mutex;
  bool stopping = false;
  bool has_looked_again = false;  // of the thread only
  Clock::time_point linger_until;
  std::mutex close_mutex;
  std::thread thread;
};

void LivenessHub::Impl::run() {
  name_this_thread("smp-hub");
  try {
    while (!should_end()) poll_once();
  } catch (const std::exception& error) {
    // The clients see their connections end, and take rank 0 for dead.
    log_line(LogLevel::kError,
             std::string("the liveness hub failed: ") + error.what());
  }
  connections.clear();
}

bool LivenessHub::Impl::should_end() {
  std::lock_guard lock(mutex);
  if (!stopping) return false;
  // What was sent before `close` is in our sockets by now: read it, since it
  // may be the goodbye that keeps the end of the hub from being a death.
  if (!std::exchange(has_looked_again, true)) return false;
  const Clock::time_point now = Clock::now();
  const bool all_gone = static_cast<int>(gone.size()) == world_size;
  if (!all_gone && now < linger_until) return false;
  const bool all_told =
      std::all_of(connections.begin(), connections.end(),
                  [](const auto& one) { return one->out.empty(); });
  return all_told || now >= linger_until + kTellTimeout;
}

void LivenessHub::Impl::poll_once() {
  door.look_again();
  const int at_door = door.is_open() ? listener.fd.get() : -1;  // -1: ignored
  std::vector<pollfd> entries = {{at_door, POLLIN, 0}, {wake.get(), POLLIN, 0}};
  for (const auto& connection : connections) {
    const int events = POLLIN | (connection->out.empty() ? 0 : POLLOUT);
    entries.push_back({connection->fd.get(), static_cast<short>(events), 0});
  }
  ::poll(entries.data(), entries.size(), static_cast<int>(kTick.count()));
  const Clock::time_point now = Clock::now();
  if (now - polled_at > kPause) hangs.on_pause(now - polled_at);
  polled_at = now;
  if (entries[1].revents != 0) wake.clear();
  for (size_t i = 2; i < entries.size(); ++i) {
    if (entries[i].revents != 0) serve(*connections[i - 2]);
  }
  if (entries[0].revents != 0) accept_all();
  drop_closed();
  say_alive();
  find_deadlock();
  report_hang();
  settle_stop();
  // At once, so that a fault is out before anything can happen to us.
  for (const auto& connection : connections) {
    const IoResult result = write_available(connection->fd, connection->out);
    if (result == IoResult::kOk) continue;
    connection->out.clear();  // reading may find a last word, and the end
    connection->is_unreachable |= result == IoResult::kUnreachable;
  }
}

void LivenessHub::Impl::accept_all() {
  while (OwnedFd fd = door.accept(listener.fd)) {
    connections.push_back(std::make_unique<Connection>(
        std::move(fd), Handshake::listener(secret, kHubPurpose)));
  }
}

void LivenessHub::Impl::serve(Connection& connection) {
  const bool is_stranger = connection.global_rank < 0;
  const size_t most = is_stranger ? kMaxHelloBytes : SIZE_MAX;
  const IoResult result = read_available(connection.fd, connection.in, most);
  try {
    read(connection);
  } catch (const Error& error) {
    if (is_stranger) door.tell_of(connection.fd, error.what());
    connection.is_closed = true;  // not one of us, or confused
  }
  connection.note(result);
}

void LivenessHub::Impl::read(Connection& connection) {
  std::string& in = connection.in;
  if (!connection.handshake.is_proven()) {
    in.erase(0, connection.handshake.advance(in, connection.out));
    if (!connection.handshake.is_proven()) return;
  }
  while (!connection.is_closed) {
    const auto frame = take_frame(in);
    if (!frame) break;
    handle(connection, *frame);
  }
  SMP_CHECK(connection.global_rank >= 0 || in.size() < kMaxHelloBytes,
            "its hello is too long");
}

void LivenessHub::Impl::handle(Connection& connection,
                               const LivenessFrame& frame) {
  const int rank = connection.global_rank;
  if (rank < 0) {
    SMP_CHECK(frame.type == Type::kHello, "expected a hello");
    return handle_hello(connection, frame);
  }
  switch (frame.type) {
    case Type::kStatus:
      return handle_status(connection, frame);
    case Type::kMissed:
    case Type::kUnreachable:
    case Type::kRaised: {
      tell_fault(rank, frame);
      LivenessFrame seen;
      seen.type = Type::kRaisedSeen;
      connection.out += encode_frame(seen);
      return;
    }
    case Type::kStopAsked:
      stop_asked = true;
      return;
    case Type::kFrozen:
      connection.frozen_at = frame.progress;
      return;
    case Type::kStacks:
      return hangs.on_stacks(rank, frame.text);
    case Type::kLeft:
      hangs.on_gone(rank);
      left.emplace(rank, frame).first->second.where = connection.status.where;
      gone.insert(rank);
      // The last thing it did may free others, whose reports are older.
      for (const auto& one : connections) one->stuck_since = Clock::now();
      return tell_others(rank, frame);
    default:
      SMP_CHECK(false, "unexpected liveness frame of type ",
                static_cast<int>(frame.type));
  }
}

void LivenessHub::Impl::handle_hello(Connection& connection,
                                     const LivenessFrame& hello) {
  const int rank = hello.global_rank;
  SMP_CHECK(rank == connection.handshake.caller_number(),
            "it says global_rank ", rank, " and has proven ",
            connection.handshake.caller_number());
  const bool is_taken =
      gone.contains(rank) ||
      std::any_of(connections.begin(), connections.end(),
                  [&](const auto& one) { return one->global_rank == rank; });
  LivenessFrame answer;
  answer.type = Type::kWelcome;
  if (rank < 0 || rank >= world_size) {
    answer.type = Type::kRefused;
    answer.text = "ranks are 0 to " + std::to_string(world_size - 1);
  } else if (is_taken) {
    answer.type = Type::kRefused;
    answer.text = "another process has this rank";
  } else {
    connection.global_rank = rank;
    door.on_no_longer_half_open();
    connection.stuck_since = Clock::now();
    if (!space.empty() && hello.where == space) {
      hangs.on_process(rank, static_cast<int>(hello.progress));
    }
  }
  connection.out += encode_frame(answer);
  if (answer.type == Type::kRefused) return;
  for (auto [other, goodbye] : left) {
    goodbye.global_rank = other;
    connection.out += encode_frame(goodbye);
  }
  if (a_fault) connection.out += encode_frame(*a_fault);
}

void LivenessHub::Impl::handle_status(Connection& connection,
                                      const LivenessFrame& status) {
  const Clock::time_point now = Clock::now();
  const bool is_stuck = status.is_blocked && status.num_unsent == 0 &&
                        connection.status.is_blocked &&
                        status.progress == connection.status.progress;
  if (!is_stuck) connection.stuck_since = now;
  connection.status = status;
  connection.status_at = now;
  hangs.on_status(connection.global_rank, status, now);
}

void LivenessHub::Impl::drop_closed() {
  for (const auto& connection : connections) {
    const int rank = connection->global_rank;
    if (rank < 0 && !connection->is_closed &&
        door.is_late(connection->accepted)) {
      door.tell_of(connection->fd, kTooLate);
      connection->is_closed = true;
    }
    if (rank < 0 && connection->is_closed) door.on_no_longer_half_open();
    if (!connection->is_closed || rank < 0 || !gone.insert(rank).second) {
      continue;
    }
    LivenessFrame died;
    died.type = connection->is_unreachable ? Type::kUnreachable : Type::kDied;
    died.progress = rank;
    if (connection->is_unreachable) died.text = unreachable_text();
    tell_fault(rank, died);
  }
  std::erase_if(connections, [](const auto& one) { return one->is_closed; });
}

void LivenessHub::Impl::say_alive() {
  if (Clock::now() - alive_at < kAliveEvery) return;
  alive_at = Clock::now();
  LivenessFrame alive;
  alive.type = Type::kAlive;
  const std::string bytes = encode_frame(alive);
  for (const auto& one : connections) {
    const bool is_quiet =
        one->status_at && alive_at - *one->status_at > kQuietAfter;
    if (one->global_rank < 0 ||
        (is_quiet && alive_at - one->alive_at < kQuietEvery)) {
      continue;
    }
    one->alive_at = alive_at;
    one->out += bytes;
  }
}

// Whether somebody waits for a collective that all of its ranks have entered.
bool LivenessHub::Impl::some_collective_goes_on(
    const std::vector<const Connection*>& ranks) const {
  using State = CollectiveLog::State;
  std::map<int, State> states;
  for (const Connection* one : ranks) {
    states[one->global_rank] = State::decode(one->status.collectives);
  }
  for (const auto& [rank, goodbye] : left) {
    states[rank] = State::decode(goodbye.collectives);
  }
  return std::any_of(states.begin(), states.end(), [&](const auto& entry) {
    const auto& wait = entry.second.waits_for;
    return wait && !wait->ranks.empty() &&
           std::all_of(wait->ranks.begin(), wait->ranks.end(), [&](int rank) {
             const auto state = states.find(rank);
             return state != states.end() && state->second.has_entered(*wait);
           });
  });
}

void LivenessHub::Impl::find_deadlock() {
  if (a_fault) return;
  const Clock::time_point now = Clock::now();
  std::vector<const Connection*> ranks;
  for (const auto& one : connections) {
    if (one->global_rank < 0 || left.contains(one->global_rank)) continue;
    const bool is_fresh =
        one->status_at && now - *one->status_at < options.status_valid;
    const bool is_stuck = one->status.is_blocked &&
                          one->status.num_unsent == 0 &&
                          now - one->stuck_since >= options.deadlock_after;
    if (!is_fresh || !is_stuck) return;
    ranks.push_back(one.get());
  }
  // Somebody is missing: not connected yet, or dead.
  if (ranks.empty() ||
      ranks.size() + left.size() != static_cast<size_t>(world_size) ||
      some_collective_goes_on(ranks)) {
    return;
  }
  LivenessFrame deadlock;
  deadlock.type = Type::kDeadlock;
  deadlock.text = deadlock_table(ranks);
  tell_fault(-1, deadlock);
}

void LivenessHub::Impl::report_hang() {
  const Clock::time_point now = Clock::now();
  if (!a_fault) {
    if (const auto report = hangs.due_report(now)) {
      log_line(LogLevel::kWarning, *report);
      LivenessFrame question;
      question.type = Type::kStacksAsked;
      tell_others(-1, question);
    }
  }
  if (const auto stacks = hangs.due_stacks(now)) {
    log_line(LogLevel::kWarning, *stacks);
  }
  if (a_fault) return;
  if (const auto stuck = hangs.due_fault(now)) {
    LivenessFrame frame;
    frame.type = Type::kStuck;
    for (const int rank : stuck->global_ranks) {
      frame.where += std::to_string(rank) + " ";
    }
    frame.text = stuck->text;
    tell_fault(-1, frame);  // those that are stuck, too
  }
}

// Freezes all ranks, asks where they are, and tells them the highest answer.
void LivenessHub::Impl::settle_stop() {
  if (!stop_asked || stop_decided || a_fault) return;
  size_t num_there = left.size();
  bool all_frozen = true;
  int64_t boundary = 0;
  for (const auto& one : connections) {
    if (one->global_rank < 0 || left.contains(one->global_rank)) continue;
    ++num_there;
    all_frozen = all_frozen && one->frozen_at.has_value();
    boundary = std::max(boundary, one->frozen_at.value_or(0));
  }
  if (num_there != static_cast<size_t>(world_size)) return;
  LivenessFrame frame;
  frame.type = all_frozen ? Type::kStopAt : Type::kFreeze;
  frame.progress = boundary;
  const std::string bytes = encode_frame(frame);
  for (const auto& one : connections) {
    if (one->global_rank < 0 || left.contains(one->global_rank)) continue;
    if (!all_frozen && std::exchange(one->is_freezing, true)) continue;
    one->out += bytes;
  }
  stop_decided = all_frozen;
}

std::string LivenessHub::Impl::deadlock_table(
    const std::vector<const Connection*>& ranks) const {
  std::vector<const Connection*> sorted = ranks;
  std::sort(sorted.begin(), sorted.end(),
            [](const Connection* a, const Connection* b) {
              return a->global_rank < b->global_rank;
            });
  std::string table = deadlock_headline();
  for (const Connection* one : sorted) {
    const LivenessFrame& status = one->status;
    table += "\n  " + rank_text(one->global_rank, status.where) + ": in " +
             status.text + " since " +
             seconds_text(milliseconds(status.blocked_ms) +
                          (Clock::now() - *one->status_at));
  }
  for (const auto& [rank, goodbye] : left) {
    table += "\n  " + rank_text(rank, goodbye.where) + ": has left";
  }
  return table;
}

// Ranks that have left come first: nobody else can be the reason.
std::string LivenessHub::Impl::deadlock_headline() const {
  const std::string after = seconds_text(options.deadlock_after);
  if (left.empty()) {
    return "every rank waits and nothing has moved for " + after +
           "; the ranks probably called different things, or in another order:";
  }
  std::string names;
  for (const auto& [rank, goodbye] : left) {
    if (!names.empty()) names += ", ";
    names += rank_text(rank, goodbye.where);
  }
  return names +
         (left.size() == 1 ? " has left (its script has finished)"
                           : " have left (their scripts have finished)") +
         ", every other rank waits, and nothing has moved for " + after + ":";
}

void LivenessHub::Impl::tell_others(int global_rank,
                                    const LivenessFrame& frame) {
  LivenessFrame told = frame;
  told.global_rank = global_rank;  // not what the sender says of itself
  const std::string bytes = encode_frame(told);
  for (const auto& one : connections) {
    if (one->global_rank >= 0 && one->global_rank != global_rank) {
      one->out += bytes;
    }
  }
}

void LivenessHub::Impl::tell_fault(int global_rank,
                                   const LivenessFrame& frame) {
  if (!a_fault) {
    a_fault = frame;
    a_fault->global_rank = global_rank;
  }
  tell_others(global_rank, frame);
}

void LivenessHub::Impl::close(milliseconds linger) {
  std::lock_guard close_lock(close_mutex);
  if (!thread.joinable()) return;
  {
    std::lock_guard lock(mutex);
    stopping = true;
    linger_until = Clock::now() + linger;
  }
  wake.wake();
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

int LivenessHub::port() const { return impl_->listener.port; }

void LivenessHub::close(milliseconds linger) {
  if (!impl_->fork_guard.in_child()) impl_->close(linger);
}

}  // namespace smp::health
