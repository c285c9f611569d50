#include "csrc/comm/mailbox.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/fork_guard.h"
#include "csrc/comm/thread_name.h"
#include "csrc/comm/wire.h"
#include "csrc/common/check.h"

namespace smp::comm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kPacketTag = 1;
constexpr int kPayloadTag = 2;
constexpr auto kForever = std::chrono::hours(24 * 365);
// How long the liveness channel may take to tell why a connection broke.
constexpr milliseconds kReasonGrace{1000};
// After this, messages to a rank that has left are given up.
constexpr milliseconds kLeftGrace{2000};
// Finished sends are collected this late, many at a time.
constexpr milliseconds kCollectEvery{1};
constexpr milliseconds kSendSlice{200};

at::Tensor new_bytes(int64_t size) {
  return at::empty({size}, at::TensorOptions(at::kByte));
}

std::span<const uint8_t> view_of(const at::Tensor& bytes) {
  return {bytes.const_data_ptr<uint8_t>(), bytes.nbytes()};
}

// Whether `work` finishes within `slice`; throws its error. Work has one type
// of error for a time-out and a failure; only the latter comes early.
bool finished_within(Work& work, milliseconds slice) {
  const Clock::time_point begin = Clock::now();
  try {
    work.wait(slice);
    return true;
  } catch (const Error&) {
    if (Clock::now() - begin < slice) throw;
    return false;
  }
}

// A send that could not begin. It becomes a fault in the collecting thread,
// so that the caller need not wait for the reason.
class FailedWork final : public Work {
 public:
  explicit FailedWork(std::string text) : text_(std::move(text)) {}
  bool done() override { return true; }
  void wait(milliseconds) override { throw Error(text_); }

 private:
  const std::string text_;
};

// The end of a receive because of close(), not because of a failure.
struct Closing {};

}  // namespace

struct Mailbox::Impl {
  Impl(CommunicatorPtr world, std::shared_ptr<FaultBoard> faults);

  // Sending.
  struct Outgoing {
    int dst;
    std::vector<WorkPtr> works;  // keep their tensors
    Clock::time_point posted;
  };
  struct Peer {
    std::mutex mutex;  // one message at a time, so that its parts stay together
    uint64_t next_sequence = 0;
  };
  void post(int dst, Message message);
  void post_to_self(Message message);
  void issue(int dst, const wire::Encoded& encoded, Outgoing& outgoing);
  void collect_sends();
  bool collect_from(std::unique_lock<std::mutex>& lock, int dst);
  void deliver_own();

  // Receiving.
  struct Inbox {
    std::mutex mutex;  // held while the handler runs
    Handler handler;
    std::deque<Message> waiting;
  };
  void receive_from(int peer);
  void receive_messages(int peer);
  Message read_message(int peer, const at::Tensor& packet, uint64_t sequence);
  WorkPtr begin_receive(const at::Tensor& to, int peer, int tag);
  void end_receive(const WorkPtr& work);
  void deliver(Message&& message);
  void handle(Inbox& inbox, Message&& message);
  void set_handler(Channel channel, Handler handler);

  void report_lost(int peer, const std::string& text);
  void close(milliseconds timeout);
  void check_open(int dst) const;
  bool all_sent_locked() const { return num_unsent == 0 && own.empty(); }

  const CommunicatorPtr world;
  const std::shared_ptr<FaultBoard> faults;
  const int self;
  const ForkGuard fork_guard;
  std::vector<std::unique_ptr<Peer>> peers;
  std::array<Inbox, static_cast<size_t>(Channel::kCount)> inboxes;

  std::atomic<int64_t> messages_sent{0};
  std::atomic<int64_t> bytes_sent{0};
  std::atomic<int64_t> messages_received{0};
  std::atomic<int64_t> bytes_received{0};

  std::mutex close_mutex;  // one close at a time
  mutable std::mutex mutex;
  std::condition_variable changed;
  bool draining = false;                      // no more posts
  bool stopping = false;                      // threads end
  std::map<int, std::deque<Outgoing>> sends;  // by destination
  int64_t num_unsent = 0;                     // messages in `sends`
  bool collector_sleeps = false;
  std::deque<Message> own;     // to oneself
  std::set<WorkPtr> receives;  // to be aborted by close
  std::vector<std::thread> threads;
  std::thread own_thread;
};

Mailbox::Impl::Impl(CommunicatorPtr the_world,
                    std::shared_ptr<FaultBoard> the_faults)
    : world(std::move(the_world)),
      faults(std::move(the_faults)),
      self(world->group_rank()) {
  for (int i = 0; i < world->size(); ++i) {
    peers.push_back(std::make_unique<Peer>());
  }
  if (world->size() == 1) return;
  threads.emplace_back([this] { collect_sends(); });
  for (int peer = 0; peer < world->size(); ++peer) {
    if (peer == self) continue;
    threads.emplace_back([this, peer] { receive_from(peer); });
  }
}

// ----------------------------------------------------------------- sending

void Mailbox::Impl::post(int dst, Message message) {
  fork_guard.check("the mailbox");
  SMP_CHECK(dst >= 0 && dst < world->size(), "cannot send to global_rank ", dst,
            ": ranks are 0 to ", world->size() - 1);
  message.source_rank = self;
  if (dst == self) return post_to_self(std::move(message));
  const wire::Encoded encoded = wire::encode(message);
  const int64_t num_bytes = encoded.num_bytes();
  Outgoing outgoing{dst, {}, Clock::now()};
  {
    std::lock_guard peer_lock(peers[dst]->mutex);
    {
      std::lock_guard lock(mutex);
      check_open(dst);
    }
    issue(dst, encoded, outgoing);
    std::lock_guard lock(mutex);
    sends[dst].push_back(std::move(outgoing));
    ++num_unsent;
    faults->waits().add_unsent(1);
    if (std::exchange(collector_sleeps, false)) changed.notify_all();
  }
  messages_sent.fetch_add(1);
  bytes_sent.fetch_add(num_bytes);
  faults->waits().add_progress();
}

void Mailbox::Impl::check_open(int dst) const {
  SMP_CHECK(!draining, "cannot send to global_rank ", dst,
            ": the mailbox is closed");
}

void Mailbox::Impl::issue(int dst, const wire::Encoded& encoded,
                          Outgoing& outgoing) {
  wire::set_sequence(encoded.packet, peers[dst]->next_sequence++);
  try {
    auto& works = outgoing.works;
    works.push_back(world->send(encoded.packet, dst, kPacketTag));
    if (encoded.blob.defined()) {
      works.push_back(world->send(encoded.blob, dst, kPayloadTag));
    }
    for (const at::Tensor& tensor : encoded.large) {
      works.push_back(world->send(tensor, dst, kPayloadTag));
    }
  } catch (const Error& error) {
    outgoing.works.push_back(std::make_shared<FailedWork>(error.what()));
  }
}

void Mailbox::Impl::collect_sends() {
  name_this_thread("smp-send");
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] {
      collector_sleeps = num_unsent == 0;
      return stopping || num_unsent > 0;
    });
    // Most sends are finished soon: asking once for many saves switches
    // between threads.
    if (!draining) changed.wait_for(lock, kCollectEvery);
    if (stopping) return;
    std::vector<int> destinations;
    for (const auto& [dst, queue] : sends) {
      if (!queue.empty()) destinations.push_back(dst);
    }
    for (const int dst : destinations) {
      while (collect_from(lock, dst)) {
      }
      if (stopping) return;
    }
  }
}

// Takes the oldest message to `dst` out when it is finished.
bool Mailbox::Impl::collect_from(std::unique_lock<std::mutex>& lock, int dst) {
  if (stopping || sends[dst].empty()) return false;
  std::vector<WorkPtr> works = sends[dst].front().works;
  const Clock::time_point posted = sends[dst].front().posted;
  lock.unlock();
  bool is_over = true;
  try {
    for (const WorkPtr& work : works) {
      is_over = is_over && finished_within(*work, kSendSlice);
    }
  } catch (const std::exception& error) {
    report_lost(dst, error.what());
  }
  if (!is_over && faults->has_left(dst) && Clock::now() - posted > kLeftGrace) {
    is_over = true;  // nobody will take it any more
  }
  std::deque<Outgoing> finished;  // its tensors are freed without our lock
  lock.lock();
  if (!is_over) return false;
  finished.push_back(std::move(sends[dst].front()));
  sends[dst].pop_front();
  --num_unsent;
  changed.notify_all();
  lock.unlock();
  faults->waits().add_unsent(-1);
  finished.clear();
  works.clear();
  lock.lock();
  return true;
}

void Mailbox::Impl::post_to_self(Message message) {
  for (MessageTensor& tensor : message.tensors) {
    if (tensor.data.defined()) tensor.data = tensor.data.detach();
  }
  {
    std::lock_guard lock(mutex);
    check_open(self);
    own.push_back(std::move(message));
    if (!own_thread.joinable()) {
      own_thread = std::thread([this] { deliver_own(); });
    }
  }
  changed.notify_all();
  messages_sent.fetch_add(1);
}

void Mailbox::Impl::deliver_own() {
  name_this_thread("smp-self");
  std::unique_lock lock(mutex);
  while (true) {
    changed.wait(lock, [&] { return stopping || !own.empty(); });
    if (stopping) return;
    Message message = std::move(own.front());
    lock.unlock();
    messages_received.fetch_add(1);
    deliver(std::move(message));
    lock.lock();
    own.pop_front();
    changed.notify_all();
  }
}

// --------------------------------------------------------------- receiving

void Mailbox::Impl::receive_from(int peer) {
  name_this_thread("smp-recv-" + std::to_string(peer));
  try {
    receive_messages(peer);
  } catch (const Closing&) {
  } catch (const wire::CorruptMessage& error) {
    faults->report({.kind = Fault::Kind::kRaised,
                    .global_rank = self,
                    .where = "the receiving thread of the mailbox",
                    .text = error.what()});
  } catch (const std::exception& error) {
    report_lost(peer, error.what());
  }
}

void Mailbox::Impl::receive_messages(int peer) {
  // Two, so that the next message can come while one is being handled.
  std::array<at::Tensor, 2> packets = {new_bytes(wire::kPacketBytes),
                                       new_bytes(wire::kPacketBytes)};
  WorkPtr next = begin_receive(packets[0], peer, kPacketTag);
  for (uint64_t sequence = 0;; ++sequence) {
    end_receive(next);
    next = begin_receive(packets[(sequence + 1) % 2], peer, kPacketTag);
    Message message = read_message(peer, packets[sequence % 2], sequence);
    messages_received.fetch_add(1);
    faults->waits().add_progress();
    deliver(std::move(message));
  }
}

Message Mailbox::Impl::read_message(int peer, const at::Tensor& packet,
                                    uint64_t sequence) {
  wire::Header header = wire::decode_packet(view_of(packet), peer);
  SMP_THROW_IF_NOT(wire::CorruptMessage, header.sequence == sequence,
                   "expected message ", sequence, " from global_rank ", peer,
                   ", got message ", header.sequence,
                   ": one was lost, or somebody else uses the communicator '",
                   world->name(), "'");
  int64_t num_bytes = wire::kPacketBytes;
  std::vector<at::Tensor> large;
  if (header.blob_is_inline) {
    large = wire::decode_blob(header.inline_blob, header);
  } else {
    const at::Tensor blob = new_bytes(header.blob_bytes);
    end_receive(begin_receive(blob, peer, kPayloadTag));
    num_bytes += header.blob_bytes;
    large = wire::decode_blob(view_of(blob), header);
  }
  std::vector<WorkPtr> works;
  works.reserve(large.size());
  for (const at::Tensor& tensor : large) {
    works.push_back(begin_receive(tensor, peer, kPayloadTag));
  }
  for (const WorkPtr& work : works) end_receive(work);
  bytes_received.fetch_add(num_bytes + header.large_bytes);
  return std::move(header.message);
}

WorkPtr Mailbox::Impl::begin_receive(const at::Tensor& to, int peer, int tag) {
  std::lock_guard lock(mutex);
  if (stopping) throw Closing{};
  WorkPtr work = world->recv(to, peer, tag);
  receives.insert(work);
  return work;
}

void Mailbox::Impl::end_receive(const WorkPtr& work) {
  std::exception_ptr failure;
  try {
    work->wait(kForever);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  std::lock_guard lock(mutex);
  receives.erase(work);
  if (failure && stopping) throw Closing{};
  if (failure) std::rethrow_exception(failure);
}

void Mailbox::Impl::deliver(Message&& message) {
  Inbox& inbox = inboxes[static_cast<size_t>(message.channel)];
  std::lock_guard lock(inbox.mutex);
  if (!inbox.handler) {
    inbox.waiting.push_back(std::move(message));
    return;
  }
  handle(inbox, std::move(message));
}

// With the inbox locked. An exception in a handler is a fault of this rank,
// whether the message comes now or had to wait for its handler.
void Mailbox::Impl::handle(Inbox& inbox, Message&& message) {
  const int source = message.source_rank;
  try {
    inbox.handler(std::move(message));
  } catch (const std::exception& error) {
    faults->report({.kind = Fault::Kind::kRaised,
                    .global_rank = self,
                    .where = "the handler of a message from global_rank " +
                             std::to_string(source),
                    .text = error.what()});
  }
}

void Mailbox::Impl::set_handler(Channel channel, Handler handler) {
  Inbox& inbox = inboxes[static_cast<size_t>(channel)];
  std::lock_guard lock(inbox.mutex);
  inbox.handler = std::move(handler);
  while (inbox.handler && !inbox.waiting.empty()) {
    Message message = std::move(inbox.waiting.front());
    inbox.waiting.pop_front();
    handle(inbox, std::move(message));
  }
}

// ------------------------------------------------------------------ the end

// A connection broke. When the peer was killed, raised or left, the liveness
// channel says so within milliseconds, and in better words.
void Mailbox::Impl::report_lost(int peer, const std::string& text) {
  const Clock::time_point deadline = Clock::now() + kReasonGrace;
  auto is_explained = [&] {
    return stopping || faults->fault().has_value() || faults->has_left(peer);
  };
  {
    std::unique_lock lock(mutex);
    while (!is_explained() && Clock::now() < deadline) {
      changed.wait_for(lock, milliseconds(20));
    }
    if (is_explained()) return;
  }
  faults->report(
      {.kind = Fault::Kind::kDied, .global_rank = peer, .text = text});
}

void Mailbox::Impl::close(milliseconds timeout) {
  std::lock_guard close_lock(close_mutex);
  std::vector<WorkPtr> in_flight;
  {
    std::unique_lock lock(mutex);
    if (stopping) return;
    draining = true;
    changed.notify_all();
    const Clock::time_point begin = Clock::now();
    while (!all_sent_locked()) {
      // After a fault the others may be gone; their absence must not cost us.
      const milliseconds limit =
          faults->fault() ? std::min(timeout, kReasonGrace) : timeout;
      if (Clock::now() - begin >= limit) break;
      changed.wait_for(lock, milliseconds(20));
    }
    stopping = true;
    in_flight.assign(receives.begin(), receives.end());
    for (const auto& [dst, queue] : sends) {
      for (const Outgoing& outgoing : queue) {
        in_flight.insert(in_flight.end(), outgoing.works.begin(),
                         outgoing.works.end());
      }
    }
  }
  changed.notify_all();
  for (const WorkPtr& work : in_flight) work->abort();
  for (std::thread& thread : threads) thread.join();
  if (own_thread.joinable()) own_thread.join();
  std::lock_guard lock(mutex);
  faults->waits().add_unsent(-num_unsent);
  num_unsent = 0;
  sends.clear();
}

Mailbox::Mailbox(CommunicatorPtr world, std::shared_ptr<FaultBoard> faults)
    : impl_(std::make_unique<Impl>(std::move(world), std::move(faults))) {}

Mailbox::~Mailbox() {
  if (impl_->fork_guard.in_child()) {
    (void)impl_.release();  // its threads are the parent's
    return;
  }
  close();
}

int Mailbox::global_rank() const { return impl_->self; }

int Mailbox::world_size() const { return impl_->world->size(); }

void Mailbox::post(int dst_global_rank, Message message) {
  impl_->post(dst_global_rank, std::move(message));
}

void Mailbox::set_handler(Channel channel, Handler handler) {
  impl_->set_handler(channel, std::move(handler));
}

Mailbox::Stats Mailbox::stats() const {
  return {impl_->messages_sent, impl_->bytes_sent, impl_->messages_received,
          impl_->bytes_received};
}

int64_t Mailbox::num_unsent() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->num_unsent;
}

int64_t Mailbox::progress() const {
  return impl_->messages_sent + impl_->messages_received;
}

void Mailbox::close(milliseconds timeout) {
  if (!impl_->fork_guard.in_child()) impl_->close(timeout);
}

}  // namespace smp::comm
