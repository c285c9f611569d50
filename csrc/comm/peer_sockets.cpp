#include "csrc/comm/peer_sockets.h"

#include <atomic>
#include <map>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "csrc/comm/incoming_peers.h"
#include "csrc/comm/socket_frames.h"
#include "csrc/comm/socket_streams.h"
#include "csrc/common/check.h"
#include "csrc/health/fork_guard.h"
#include "csrc/health/handshake.h"
#include "csrc/health/socket_events.h"
#include "csrc/health/thread_name.h"

namespace smp::comm {
namespace {

using Kind = health::SocketEvents::Kind;

constexpr const char* kClosedHere = "closed by this process";

struct Address {
  std::string host;
  int port = 0;
};

Address read_address(const std::string& text) {
  Address address;
  std::istringstream words(text);
  std::string rest;
  words >> address.host >> address.port;
  SMP_CHECK(words && !(words >> rest), "'", text,
            "' is no address of a rank; expected a host and a port");
  return address;
}

}  // namespace

struct PeerSockets::Impl {
  // The connection to one other rank; never removed.
  struct Peer {
    std::mutex mutex;
    OutgoingSocket socket;
    bool is_connected = false;
    std::string error;  // why nothing goes there any more
  };

  Impl(int global_rank, Options options);

  Peer& peer_of(int global_rank);
  void post(int dst, uint64_t stream, std::vector<Outgoing> frames, Sent sent);

  void run();
  bool is_stopping();
  void serve(Kind kind, uint64_t number, uint32_t what);
  void open_wanted();
  void open(int peer);
  void serve_outgoing(int peer, uint32_t what);
  std::string go_on(int peer, Peer& to, uint32_t what,
                    OutgoingSocket::Done& done);
  void fail_outgoing(int peer, const std::string& why);
  void lose_outgoing(int peer, const std::string& why);
  void lose(int peer, const std::string& why);
  void close();

  const int self;
  const Options options;
  const health::ForkGuard fork_guard;
  const health::WakeFd wake;
  const health::SocketEvents events;
  SocketStreams streams;
  IncomingPeers incoming;

  std::mutex mutex;
  std::vector<std::string> addresses;
  std::map<int, std::unique_ptr<Peer>> peers;
  std::vector<int> wanted;  // connections that the thread opens
  bool stopping = false;

  std::atomic<int64_t> num_opened{0};
  std::mutex close_mutex;
  std::thread thread;
};

PeerSockets::Impl::Impl(int global_rank, Options the_options)
    : self(global_rank),
      options(std::move(the_options)),
      incoming(
          events, global_rank, options.address, options.secret, options.door,
          {[this](uint64_t stream) { return streams.receiver_of(stream); },
           [this](int peer, const std::string& why) { lose(peer, why); }}) {
  events.add(wake.get(), EPOLLIN, Kind::kWake, 0);
  thread = std::thread([this] { run(); });
}

// ------------------------------------------------------------ other threads

PeerSockets::Impl::Peer& PeerSockets::Impl::peer_of(int global_rank) {
  std::lock_guard lock(mutex);
  std::unique_ptr<Peer>& peer = peers[global_rank];
  if (!peer) {
    peer = std::make_unique<Peer>();
    if (stopping) peer->error = kClosedHere;  // no thread opens it any more
  }
  return *peer;
}

void PeerSockets::Impl::post(int dst, uint64_t stream,
                             std::vector<Outgoing> frames, Sent sent) {
  fork_guard.check("the connection to other ranks");
  Peer& peer = peer_of(dst);
  OutgoingSocket::Done done;
  std::string error;
  bool is_wanted = false;
  {
    std::lock_guard lock(peer.mutex);
    if (!peer.error.empty()) {
      if (sent) done.emplace_back(std::move(sent), peer.error);
    } else {
      is_wanted = peer.socket.is_new() && !peer.socket.has_unsent();
      const bool is_first = !peer.socket.has_unsent();
      peer.socket.queue(stream, std::move(frames), std::move(sent));
      // Frames behind others are sent by the thread.
      if (peer.socket.is_open() && is_first) {
        error = peer.socket.send(done);
        if (peer.socket.has_unsent() && error.empty()) {
          events.change(peer.socket.fd().get(), EPOLLIN | EPOLLOUT,
                        Kind::kOutgoing, dst);
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

// --------------------------------------------------------------- the thread

void PeerSockets::Impl::run() {
  health::name_this_thread("smp-sockets");
  while (!is_stopping()) {
    events.wait(incoming.tick_ms(),
                [this](Kind kind, uint64_t number, uint32_t what) {
                  serve(kind, number, what);
                });
    incoming.tick();
  }
  incoming.close();
}

bool PeerSockets::Impl::is_stopping() {
  std::lock_guard lock(mutex);
  return stopping;
}

void PeerSockets::Impl::serve(Kind kind, uint64_t number, uint32_t what) {
  switch (kind) {
    case Kind::kWake:
      wake.clear();
      return open_wanted();
    case Kind::kListener:
      return incoming.accept_all();
    case Kind::kIncoming:
      return incoming.serve(number);
    case Kind::kOutgoing:
      return serve_outgoing(static_cast<int>(number), what);
  }
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
                "there is no such rank");
      text = addresses[peer];
    }
    const Address address = read_address(text);
    auto handshake =
        health::Handshake::caller(options.secret, peer_purpose(peer), self);
    health::OwnedFd fd = health::begin_connect_tcp(address.host, address.port);
    Peer& to = peer_of(peer);
    std::lock_guard lock(to.mutex);
    to.socket.begin(std::move(fd), std::move(handshake));
    events.add(to.socket.fd().get(), EPOLLIN | EPOLLOUT, Kind::kOutgoing, peer);
    num_opened.fetch_add(1);
  } catch (const Error& error) {
    lose_outgoing(peer, error.what());
  }
}

void PeerSockets::Impl::serve_outgoing(int peer, uint32_t what) {
  Peer& to = peer_of(peer);
  OutgoingSocket::Done done;
  std::string error;
  {
    std::lock_guard lock(to.mutex);
    if (!to.error.empty() || to.socket.is_new()) return;
    try {
      error = go_on(peer, to, what, done);
    } catch (const Error& caught) {
      error = caught.what();
    }
  }
  for (auto& [call, text] : done) call(text);
  if (!error.empty()) lose_outgoing(peer, error);
}

// Connects, proves or sends, whatever is next; called with the lock of the
// peer. Returns why the connection is broken; empty if it is not.
std::string PeerSockets::Impl::go_on(int peer, Peer& to, uint32_t what,
                                     OutgoingSocket::Done& done) {
  OutgoingSocket& socket = to.socket;
  if (!to.is_connected) {
    const std::string why = health::connect_error(socket.fd());
    if (!why.empty()) {
      return "cannot connect: " + why +
             "; check that no firewall is between the hosts";
    }
    if ((what & EPOLLOUT) == 0) return "";
    to.is_connected = true;
  }
  std::string error;
  if (!socket.is_open()) error = socket.prove();
  if (error.empty() && socket.is_open()) {
    error = socket.send(done);
    if (error.empty() && (what & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
      error = socket.look_for_end();
    }
  }
  if (!error.empty()) return error;
  events.change(socket.fd().get(),
                socket.wants_to_write() ? EPOLLIN | EPOLLOUT : EPOLLIN,
                Kind::kOutgoing, peer);
  return "";
}

void PeerSockets::Impl::fail_outgoing(int peer, const std::string& why) {
  OutgoingSocket::Done done;
  Peer& to = peer_of(peer);
  {
    std::lock_guard lock(to.mutex);
    if (to.error.empty()) to.error = why;
    to.socket.fail(to.error, done);
  }
  for (auto& [call, text] : done) call(text);
}

// Ends sending to the peer. Its messages may still be on their way; receiving
// ends with the connection from there.
void PeerSockets::Impl::lose_outgoing(int peer, const std::string& why) {
  fail_outgoing(peer, why);
  if (!incoming.will_tell(peer, why)) streams.lose(peer, why);
}

void PeerSockets::Impl::lose(int peer, const std::string& why) {
  fail_outgoing(peer, why);
  streams.lose(peer, why);
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
  streams.clear();
  std::vector<int> ranks;
  {
    std::lock_guard lock(mutex);
    for (const auto& [rank, peer] : peers) ranks.push_back(rank);
  }
  for (const int rank : ranks) lose(rank, kClosedHere);
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
  return impl_->options.address + " " + std::to_string(impl_->incoming.port());
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
  impl_->streams.add(stream, std::move(receiver));
}

void PeerSockets::remove_receiver(uint64_t stream) {
  impl_->streams.remove(stream);
}

void PeerSockets::post(int dst_global_rank, uint64_t stream,
                       std::vector<Outgoing> frames, Sent sent) {
  impl_->post(dst_global_rank, stream, std::move(frames), std::move(sent));
}

int64_t PeerSockets::num_connections() const {
  return impl_->num_opened.load() + impl_->incoming.num_ranks();
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
