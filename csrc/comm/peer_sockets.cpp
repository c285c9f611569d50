#include "csrc/comm/peer_sockets.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "csrc/comm/socket_frames.h"
#include "csrc/common/check.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/socket.h"
#include "csrc/health/thread_name.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A connection that has not said who it is by then is nobody of ours.
constexpr milliseconds kStrangerTimeout{10000};
constexpr milliseconds kTick{1000};
constexpr int kMaxEvents = 64;

std::string random_token() {
  std::random_device random;
  std::string token;
  for (size_t i = 0; i < kTokenBytes; ++i) {
    token += "0123456789abcdef"[random() % 16];
  }
  return token;
}

// Keeps what comes for a stream that has no receiver yet, then hands it on.
class EarlyFrames final : public PeerSockets::Receiver {
 public:
  uint8_t* begin(const PeerSockets::Frame& frame) override {
    std::lock_guard lock(mutex_);
    if (target_) {
      open_[frame.source_rank] = nullptr;
      return target_->begin(frame);
    }
    Kept& kept = frames_.emplace_back(Kept{frame, {}});
    kept.bytes.resize(frame.size);
    open_[frame.source_rank] = &kept;
    return kept.bytes.data();
  }

  void end(const PeerSockets::Frame& frame) override {
    std::lock_guard lock(mutex_);
    Kept* const kept = open_.at(frame.source_rank);
    open_.erase(frame.source_rank);
    if (kept == nullptr) return target_->end(frame);
    kept->is_complete = true;
    if (target_) hand_on(*kept);
  }

  void lost(int, const std::string&) override {}

  void hand_on_to(std::shared_ptr<PeerSockets::Receiver> target) {
    std::lock_guard lock(mutex_);
    target_ = std::move(target);
    for (const Kept& kept : frames_) {
      if (kept.is_complete) hand_on(kept);
    }
    while (!frames_.empty() && frames_.front().is_complete) {
      frames_.pop_front();
    }
  }

 private:
  struct Kept {
    PeerSockets::Frame frame;
    std::vector<uint8_t> bytes;
    bool is_complete = false;
  };

  void hand_on(const Kept& kept) {
    uint8_t* const to = target_->begin(kept.frame);
    std::copy(kept.bytes.begin(), kept.bytes.end(), to);
    target_->end(kept.frame);
  }

  std::mutex mutex_;
  std::deque<Kept> frames_;    // stay where they are
  std::map<int, Kept*> open_;  // by source; null: the target has it
  std::shared_ptr<PeerSockets::Receiver> target_;
};

// For a stream that is over.
class Nobody final : public PeerSockets::Receiver {
 public:
  uint8_t* begin(const PeerSockets::Frame& frame) override {
    auto& bytes = bytes_[frame.source_rank];
    bytes.resize(frame.size);
    return bytes.data();
  }
  void end(const PeerSockets::Frame& frame) override {
    bytes_.erase(frame.source_rank);
  }
  void lost(int, const std::string&) override {}

 private:
  std::map<int, std::vector<uint8_t>> bytes_;
};

struct Address {
  std::string host;
  int port = 0;
  std::string token;
};

Address read_address(const std::string& text) {
  Address address;
  std::istringstream words(text);
  words >> address.host >> address.port >> address.token;
  SMP_CHECK(words && address.token.size() == kTokenBytes, "'", text,
            "' is no address of a rank");
  return address;
}

// What an event of epoll is about.
enum class Kind : uint64_t { kWake, kListener, kIncoming, kOutgoing };
constexpr int kKindShift = 56;

uint64_t event_data(Kind kind, uint64_t number) {
  return static_cast<uint64_t>(kind) << kKindShift | number;
}

}  // namespace

struct PeerSockets::Impl {
  // To one other rank; never removed.
  struct Peer {
    std::mutex mutex;
    OutgoingSocket socket;
    std::string error;  // why nothing goes there any more
  };
  struct Incoming {
    Incoming(health::OwnedFd fd, const std::string& token,
             IncomingSocket::FindReceiver find)
        : socket(std::move(fd), token, std::move(find)) {}
    IncomingSocket socket;
    const Clock::time_point since = Clock::now();
  };

  Impl(int global_rank, Options options);

  Peer& peer_of(int global_rank);
  void post(int dst, uint64_t stream, std::vector<Outgoing> frames, Sent sent);
  std::shared_ptr<Receiver> receiver_of(uint64_t stream);
  void add_receiver(uint64_t stream, std::shared_ptr<Receiver> receiver);

  void run();
  bool is_stopping();
  void serve(const epoll_event& event);
  void watch(int fd, uint32_t events, uint64_t data, bool is_new) const;
  void open_wanted();
  void open(int peer);
  void serve_outgoing(int peer, uint32_t events);
  void accept_all();
  void serve_incoming(uint64_t id);
  void drop_strangers();
  void lose_outgoing(int peer, const std::string& why);
  void lose(int peer, const std::string& why);
  void close();

  const int self;
  const Options options;
  const std::string token = random_token();
  const health::ForkGuard fork_guard;
  const health::Listener listener;
  const health::WakeFd wake;
  const health::OwnedFd epoll{::epoll_create1(EPOLL_CLOEXEC)};

  std::mutex mutex;
  std::vector<std::string> addresses;
  std::map<int, std::unique_ptr<Peer>> peers;
  std::vector<int> wanted;  // connections that the thread opens
  std::map<uint64_t, std::shared_ptr<Receiver>> receivers;
  std::set<int> sources;  // have a connection to this process
  std::map<int, std::string> lost;
  bool stopping = false;

  // Of the thread.
  std::map<uint64_t, std::unique_ptr<Incoming>> incoming;
  uint64_t next_id = 0;
  size_t num_strangers = 0;

  std::atomic<int64_t> num_connections{0};
  std::mutex close_mutex;
  std::thread thread;
};

PeerSockets::Impl::Impl(int global_rank, Options the_options)
    : self(global_rank),
      options(std::move(the_options)),
      listener(health::listen_tcp(options.loopback_only)) {
  SMP_CHECK(epoll, "cannot make an epoll descriptor");
  watch(wake.get(), EPOLLIN, event_data(Kind::kWake, 0), true);
  watch(listener.fd.get(), EPOLLIN, event_data(Kind::kListener, 0), true);
  thread = std::thread([this] { run(); });
}

// ------------------------------------------------------------ other threads

PeerSockets::Impl::Peer& PeerSockets::Impl::peer_of(int global_rank) {
  std::lock_guard lock(mutex);
  std::unique_ptr<Peer>& peer = peers[global_rank];
  if (!peer) peer = std::make_unique<Peer>();
  return *peer;
}

void PeerSockets::Impl::post(int dst, uint64_t stream,
                             std::vector<Outgoing> frames, Sent sent) {
  fork_guard.check("the connection to other ranks");
  Peer& peer = peer_of(dst);
  OutgoingSocket::Done done;
  std::string error;
  bool is_wanted = false;
  bool needs_thread = false;
  {
    std::lock_guard lock(peer.mutex);
    if (!peer.error.empty()) {
      if (sent) done.emplace_back(std::move(sent), peer.error);
    } else {
      is_wanted = peer.socket.is_new() && !peer.socket.has_unsent();
      const bool is_first = !peer.socket.has_unsent();
      peer.socket.queue(stream, std::move(frames), std::move(sent));
      // Behind others the thread sends it.
      if (peer.socket.is_open() && is_first) {
        error = peer.socket.send(done);
        needs_thread = peer.socket.has_unsent() && error.empty();
        if (needs_thread) {
          watch(peer.socket.fd().get(), EPOLLIN | EPOLLOUT,
                event_data(Kind::kOutgoing, dst), false);
        }
      }
    }
  }
  if (is_wanted) {
    std::lock_guard lock(mutex);
    wanted.push_back(dst);
  }
  if (is_wanted) wake.wake();
  for (auto& [call, text] : done) call(text);
  if (!error.empty()) lose_outgoing(dst, error);
}

std::shared_ptr<PeerSockets::Receiver> PeerSockets::Impl::receiver_of(
    uint64_t stream) {
  std::lock_guard lock(mutex);
  std::shared_ptr<Receiver>& receiver = receivers[stream];
  if (!receiver) receiver = std::make_shared<EarlyFrames>();
  return receiver;
}

void PeerSockets::Impl::add_receiver(uint64_t stream,
                                     std::shared_ptr<Receiver> receiver) {
  const std::shared_ptr<Receiver> before = receiver_of(stream);
  auto* const early = dynamic_cast<EarlyFrames*>(before.get());
  SMP_ASSERT(early != nullptr, "a stream has two receivers");
  early->hand_on_to(receiver);
  std::map<int, std::string> lost_before;
  {
    std::lock_guard lock(mutex);
    receivers[stream] = receiver;
    lost_before = lost;
  }
  for (const auto& [peer, why] : lost_before) receiver->lost(peer, why);
}

// --------------------------------------------------------------- the thread

void PeerSockets::Impl::run() {
  health::name_this_thread("smp-sockets");
  std::array<epoll_event, kMaxEvents> events;
  while (!is_stopping()) {
    const int tick = num_strangers > 0 ? static_cast<int>(kTick.count()) : -1;
    const int count =
        ::epoll_wait(epoll.get(), events.data(), kMaxEvents, tick);
    for (int i = 0; i < count; ++i) serve(events[i]);
    if (num_strangers > 0) drop_strangers();
  }
  incoming.clear();
}

bool PeerSockets::Impl::is_stopping() {
  std::lock_guard lock(mutex);
  return stopping;
}

void PeerSockets::Impl::serve(const epoll_event& event) {
  const uint64_t number = event.data.u64 & ((uint64_t{1} << kKindShift) - 1);
  switch (static_cast<Kind>(event.data.u64 >> kKindShift)) {
    case Kind::kWake:
      wake.clear();
      return open_wanted();
    case Kind::kListener:
      return accept_all();
    case Kind::kIncoming:
      return serve_incoming(number);
    case Kind::kOutgoing:
      return serve_outgoing(static_cast<int>(number), event.events);
  }
}

void PeerSockets::Impl::watch(int fd, uint32_t events, uint64_t data,
                              bool is_new) const {
  epoll_event event{};
  event.events = events;
  event.data.u64 = data;
  SMP_CHECK(::epoll_ctl(epoll.get(), is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd,
                        &event) == 0,
            "cannot watch a connection: ", std::strerror(errno));
}

void PeerSockets::Impl::open_wanted() {
  std::vector<int> now;
  {
    std::lock_guard lock(mutex);
    if (addresses.empty()) return;  // set_addresses wakes us
    now.swap(wanted);
  }
  for (const int peer : now) open(peer);
}

void PeerSockets::Impl::open(int peer) {
  std::string text;
  try {
    {
      std::lock_guard lock(mutex);
      SMP_CHECK(peer < static_cast<int>(addresses.size()),
                "there is no such "
                "rank");
      text = addresses[peer];
    }
    const Address address = read_address(text);
    SocketHello hello{0, self, {}};
    std::copy(address.token.begin(), address.token.end(), hello.token.begin());
    health::OwnedFd fd = health::begin_connect_tcp(address.host, address.port);
    Peer& to = peer_of(peer);
    std::lock_guard lock(to.mutex);
    to.socket.begin(std::move(fd), hello);
    watch(to.socket.fd().get(), EPOLLIN | EPOLLOUT,
          event_data(Kind::kOutgoing, peer), true);
    num_connections.fetch_add(1);
  } catch (const Error& error) {
    lose_outgoing(peer, error.what());
  }
}

void PeerSockets::Impl::serve_outgoing(int peer, uint32_t events) {
  Peer& to = peer_of(peer);
  OutgoingSocket::Done done;
  std::string error;
  {
    std::lock_guard lock(to.mutex);
    if (!to.error.empty() || to.socket.is_new()) return;
    if (!to.socket.is_open()) {
      error = health::connect_error(to.socket.fd());
      if (!error.empty()) {
        error = "cannot connect: " + error +
                "; check that no firewall is between the hosts";
      } else if ((events & EPOLLOUT) != 0) {
        to.socket.open();
      }
    }
    if (error.empty() && to.socket.is_open()) {
      error = to.socket.send(done);
      if (error.empty() && (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
        error = to.socket.look_for_end();
      }
      if (error.empty() && !to.socket.has_unsent()) {
        watch(to.socket.fd().get(), EPOLLIN, event_data(Kind::kOutgoing, peer),
              false);
      }
    }
  }
  for (auto& [call, text] : done) call(text);
  if (!error.empty()) lose_outgoing(peer, error);
}

void PeerSockets::Impl::accept_all() {
  while (health::OwnedFd fd = health::accept_tcp(listener.fd)) {
    const uint64_t id = next_id++;
    const int number = fd.get();
    incoming[id] = std::make_unique<Incoming>(
        std::move(fd), token,
        [this](uint64_t stream) { return receiver_of(stream); });
    ++num_strangers;
    watch(number, EPOLLIN, event_data(Kind::kIncoming, id), true);
  }
}

void PeerSockets::Impl::serve_incoming(uint64_t id) {
  const auto entry = incoming.find(id);
  if (entry == incoming.end()) return;
  IncomingSocket& socket = entry->second->socket;
  const bool was_stranger = socket.source_rank() < 0;
  std::string why;
  bool goes_on = false;
  try {
    goes_on = socket.read(why);
  } catch (const std::exception& error) {
    why = error.what();
  }
  const int source = socket.source_rank();
  if (was_stranger && (source >= 0 || !goes_on)) --num_strangers;
  if (was_stranger && source >= 0) {
    num_connections.fetch_add(1);
    std::lock_guard lock(mutex);
    sources.insert(source);
  }
  if (goes_on) return;
  incoming.erase(entry);
  if (source >= 0) lose(source, why);
}

void PeerSockets::Impl::drop_strangers() {
  const Clock::time_point now = Clock::now();
  num_strangers -= std::erase_if(incoming, [&](const auto& entry) {
    return entry.second->socket.source_rank() < 0 &&
           now - entry.second->since > kStrangerTimeout;
  });
}

// Nothing goes to the peer any more. What it has sent may still be on its way:
// that is over when the connection from there ends.
void PeerSockets::Impl::lose_outgoing(int peer, const std::string& why) {
  OutgoingSocket::Done done;
  Peer& to = peer_of(peer);
  {
    std::lock_guard lock(to.mutex);
    if (to.error.empty()) to.error = why;
    to.socket.fail(to.error, done);
  }
  for (auto& [call, text] : done) call(text);
  {
    std::lock_guard lock(mutex);
    if (sources.contains(peer)) return;
  }
  lose(peer, why);
}

void PeerSockets::Impl::lose(int peer, const std::string& why) {
  OutgoingSocket::Done done;
  Peer& to = peer_of(peer);
  {
    std::lock_guard lock(to.mutex);
    if (to.error.empty()) to.error = why;
    to.socket.fail(to.error, done);
  }
  std::vector<std::shared_ptr<Receiver>> told;
  {
    std::lock_guard lock(mutex);
    if (lost.emplace(peer, why).second) {
      for (const auto& [stream, receiver] : receivers) {
        told.push_back(receiver);
      }
    }
  }
  for (auto& [call, text] : done) call(text);
  for (const auto& receiver : told) receiver->lost(peer, why);
}

void PeerSockets::Impl::close() {
  std::lock_guard close_lock(close_mutex);
  if (!thread.joinable()) return;
  {
    std::lock_guard lock(mutex);
    stopping = true;
  }
  wake.wake();
  thread.join();
  std::vector<int> ranks;
  {
    std::lock_guard lock(mutex);
    receivers.clear();
    for (const auto& [rank, peer] : peers) ranks.push_back(rank);
  }
  for (const int rank : ranks) lose(rank, "closed by this process");
}

// ------------------------------------------------------------------- public

PeerSockets::PeerSockets(int global_rank, Options options)
    : impl_(std::make_unique<Impl>(global_rank, std::move(options))) {}

PeerSockets::~PeerSockets() {
  if (impl_->fork_guard.in_child()) {
    (void)impl_.release();  // its thread is the parent's
    return;
  }
  impl_->close();
}

int PeerSockets::global_rank() const { return impl_->self; }

std::string PeerSockets::address() const {
  const std::string& host = impl_->options.address;
  return (host.empty() ? "127.0.0.1" : host) + " " +
         std::to_string(impl_->listener.port) + " " + impl_->token;
}

void PeerSockets::set_addresses(std::vector<std::string> addresses) {
  for (const std::string& address : addresses) (void)read_address(address);
  {
    std::lock_guard lock(impl_->mutex);
    impl_->addresses = std::move(addresses);
  }
  impl_->wake.wake();
}

void PeerSockets::add_receiver(uint64_t stream,
                               std::shared_ptr<Receiver> receiver) {
  impl_->add_receiver(stream, std::move(receiver));
}

void PeerSockets::remove_receiver(uint64_t stream) {
  std::lock_guard lock(impl_->mutex);
  impl_->receivers[stream] = std::make_shared<Nobody>();
}

void PeerSockets::post(int dst_global_rank, uint64_t stream,
                       std::vector<Outgoing> frames, Sent sent) {
  impl_->post(dst_global_rank, stream, std::move(frames), std::move(sent));
}

int64_t PeerSockets::num_connections() const {
  return impl_->num_connections.load();
}

void PeerSockets::close() {
  if (!impl_->fork_guard.in_child()) impl_->close();
}

uint64_t stream_of(const std::string& name) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const char letter : name) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
  }
  return hash;
}

}  // namespace smp::comm
