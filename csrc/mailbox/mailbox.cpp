#include "csrc/mailbox/mailbox.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/comm/agreement.h"
#include "csrc/common/check.h"
#include "csrc/health/fork_guard.h"
#include "csrc/mailbox/communicator_link.h"
#include "csrc/mailbox/lane_posts.h"
#include "csrc/mailbox/self_link.h"
#include "csrc/mailbox/shared_memory_link.h"
#include "csrc/mailbox/socket_link.h"
#include "csrc/mailbox/substitutes.h"

namespace smp::mailbox {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Limits of the time for unsent messages at the end of a failed run.
constexpr milliseconds kFaultGrace{1000};
constexpr milliseconds kLookEvery{1};

}  // namespace

struct Mailbox::Impl {
  Impl(comm::CommunicatorPtr world, std::shared_ptr<health::FaultBoard> faults,
       const shm::SharedMemoryPtr& shared_memory, lanes::LaneOptions lanes,
       std::shared_ptr<comm::PeerSockets> sockets);

  struct Inbox {
    std::mutex mutex;  // held while the handler runs
    Handler handler;
    std::deque<Message> waiting;
  };
  void post(int dst, Message message);
  void deliver(Message&& message);
  void handle(Inbox& inbox, Message&& message);
  void hand_over(Message&& message);
  bool receive_from_lanes(Message& message);
  void report(int source, const char* text);
  void set_handler(Channel channel, Handler handler);
  Stats stats() const;
  int64_t num_unsent() const;
  void wait_until_sent(milliseconds timeout) const;
  void close(milliseconds timeout);

  const comm::CommunicatorPtr world;
  const std::shared_ptr<health::FaultBoard> faults;
  const int self;
  const health::ForkGuard fork_guard;
  const Pause pause;
  std::array<Inbox, static_cast<size_t>(Channel::kCount)> inboxes;

  std::vector<std::unique_ptr<Link>> links;
  std::vector<Link*> link_of;   // by global rank
  Link* shared_link = nullptr;  // one of `links`
  std::atomic<bool> has_links{false};
  std::unique_ptr<LanePosts> lane_posts;  // null: there are no lanes

  std::shared_mutex gate;  // shared by posts, so that none follows `closed`
  bool closed = false;
  std::mutex close_mutex;  // one close at a time
  bool stopped = false;
};

Mailbox::Impl::Impl(comm::CommunicatorPtr the_world,
                    std::shared_ptr<health::FaultBoard> the_faults,
                    const shm::SharedMemoryPtr& shared_memory,
                    lanes::LaneOptions lanes,
                    std::shared_ptr<comm::PeerSockets> sockets)
    : world(std::move(the_world)),
      faults(std::move(the_faults)),
      self(world->group_rank()),
      pause(substitutes().pause ? substitutes().pause(self) : Pause{}),
      link_of(world->size(), nullptr) {
  LinkOwner owner{self, faults,
                  [this](Message&& message) { deliver(std::move(message)); },
                  pause, lanes.device};
  if (!lanes.source && substitutes().lanes) {
    lanes.source = substitutes().lanes();
  }
  SMP_CHECK_VALUE(
      (lanes.mode != "ipc" && lanes.mode != "nccl") || lanes.needs_agreement(),
      "SMP_LANE=", lanes.mode, " needs CUDA devices, and this rank works on ",
      lanes.device, "; unset SMP_LANE");
  if (lanes.has_lanes()) {
    LinkOwner after_lanes = owner;
    after_lanes.deliver = [this](Message&& message) {
      hand_over(std::move(message));
    };
    lane_posts = std::make_unique<LanePosts>(
        lanes, after_lanes, world->size(), [this](int dst, Message message) {
          // A message may come before all links exist.
          has_links.wait(false);
          link_of[dst]->post(dst, std::move(message));
        });
    owner.lanes = &lane_posts->table();
    if (lanes.needs_agreement()) {
      comm::WaitOptions wait;
      wait.timeout = lanes.timeout;
      wait.faults = faults;
      wait.hint = "did every rank call smp.init?";
      lane_posts->table().agree([&](const std::string& own) {
        return comm::gather_bytes(*world, own, wait,
                                  "agreement on lanes between devices");
      });
    }
  }
  auto add = [&](std::unique_ptr<Link> link, const std::vector<int>& ranks) {
    for (const int rank : ranks) link_of.at(rank) = link.get();
    links.push_back(std::move(link));
  };
  add(std::make_unique<SelfLink>(owner), {self});
  std::vector<int> shared;
  if (shared_memory) shared = shared_memory->peers();
  if (!shared.empty()) {
    add(std::make_unique<SharedMemoryLink>(shared_memory, owner), shared);
    shared_link = links.back().get();
  }
  std::vector<int> others;
  for (int rank = 0; rank < world->size(); ++rank) {
    if (link_of[rank] == nullptr) others.push_back(rank);
  }
  if (sockets && !others.empty()) {
    add(std::make_unique<SocketLink>(std::move(sockets), others, owner),
        others);
  } else if (!others.empty()) {
    add(std::make_unique<CommunicatorLink>(world, others, owner), others);
  }
  has_links = true;
  has_links.notify_all();
}

void Mailbox::Impl::post(int dst, Message message) {
  fork_guard.check("the mailbox");
  if (pause) pause(PausePlace::kPost);
  SMP_CHECK(dst >= 0 && dst < world->size(), "cannot send to global_rank ", dst,
            ": ranks are 0 to ", world->size() - 1);
  std::shared_lock lock(gate);
  SMP_CHECK(!closed, "cannot send to global_rank ", dst,
            ": the mailbox is closed");
  message.source_rank = self;
  if (lane_posts && dst != self) {
    lane_posts->post(dst, std::move(message));
  } else {
    link_of[dst]->post(dst, std::move(message));
  }
}

// Returns whether the message is for its handler, now.
bool Mailbox::Impl::receive_from_lanes(Message& message) {
  const int source = message.source_rank;
  try {
    if (!lane_posts->receive(message)) return false;
    lane_posts->take(message);
    return true;
  } catch (const std::exception& error) {
    report(source, error.what());
    return false;
  }
}

void Mailbox::Impl::deliver(Message&& message) {
  if (pause) pause(PausePlace::kDeliver);
  if (lane_posts && message.source_rank != self &&
      !receive_from_lanes(message)) {
    return;
  }
  hand_over(std::move(message));
}

void Mailbox::Impl::hand_over(Message&& message) {
  Inbox& inbox = inboxes[static_cast<size_t>(message.channel)];
  std::lock_guard lock(inbox.mutex);
  if (!inbox.handler) {
    inbox.waiting.push_back(std::move(message));
    return;
  }
  handle(inbox, std::move(message));
}

// Calls the handler; called with the inbox locked. An exception in a handler is
// a fault of this rank, even if the message had to wait for its handler.
void Mailbox::Impl::handle(Inbox& inbox, Message&& message) {
  const int source = message.source_rank;
  try {
    inbox.handler(std::move(message));
  } catch (const std::exception& error) {
    report(source, error.what());
  }
}

void Mailbox::Impl::report(int source, const char* text) {
  faults->report({.kind = health::Fault::Kind::kRaised,
                  .global_rank = self,
                  .where = "the handler of a message from global_rank " +
                           std::to_string(source),
                  .text = text});
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

Mailbox::Stats Mailbox::Impl::stats() const {
  Stats total;
  for (const auto& link : links) {
    const Traffic traffic = link->traffic();
    total.messages_sent += traffic.messages_sent;
    total.bytes_sent += traffic.bytes_sent;
    total.messages_received += traffic.messages_received;
    total.bytes_received += traffic.bytes_received;
  }
  if (shared_link != nullptr) total.shared_memory = shared_link->traffic();
  if (lane_posts) total.lanes = lane_posts->table().counters();
  return total;
}

int64_t Mailbox::Impl::num_unsent() const {
  int64_t total = lane_posts ? lane_posts->num_unsent() : 0;
  for (const auto& link : links) total += link->num_unsent();
  return total;
}

void Mailbox::Impl::wait_until_sent(milliseconds timeout) const {
  const Clock::time_point begin = Clock::now();
  while (num_unsent() > 0) {
    // After a fault other ranks may be lost, and waiting for them is useless.
    const milliseconds limit =
        faults->fault() ? std::min(timeout, kFaultGrace) : timeout;
    if (Clock::now() - begin >= limit) break;
    std::this_thread::sleep_for(kLookEvery);
  }
}

void Mailbox::Impl::close(milliseconds timeout) {
  std::lock_guard close_lock(close_mutex);
  if (std::exchange(stopped, true)) return;
  {
    std::unique_lock lock(gate);
    closed = true;
  }
  if (lane_posts) lane_posts->begin_close();
  for (const auto& link : links) link->begin_close();
  wait_until_sent(timeout);
  if (lane_posts) {
    lane_posts->stop();
    wait_until_sent(std::min(timeout, kFaultGrace));  // the last receipts
  }
  for (const auto& link : links) link->stop();
}

Mailbox::Mailbox(comm::CommunicatorPtr world,
                 std::shared_ptr<health::FaultBoard> faults,
                 const shm::SharedMemoryPtr& shared_memory,
                 lanes::LaneOptions lanes,
                 std::shared_ptr<comm::PeerSockets> sockets)
    : impl_(std::make_unique<Impl>(std::move(world), std::move(faults),
                                   shared_memory, std::move(lanes),
                                   std::move(sockets))) {}

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

bool Mailbox::help_until(const std::function<bool()>& done,
                         const std::function<bool()>& is_alone) {
  return impl_->shared_link != nullptr &&
         impl_->shared_link->help_until(done, is_alone);
}

void Mailbox::wake_helper() {
  if (impl_->shared_link != nullptr) impl_->shared_link->wake_helper();
}

lanes::LaneChoices Mailbox::lanes() const {
  return impl_->lane_posts ? impl_->lane_posts->table().choices()
                           : lanes::LaneChoices{};
}

Mailbox::Stats Mailbox::stats() const { return impl_->stats(); }

std::shared_ptr<lanes::CopyLog> Mailbox::lane_copies() const {
  return impl_->lane_posts ? impl_->lane_posts->copies() : nullptr;
}

int64_t Mailbox::num_unsent() const { return impl_->num_unsent(); }

int64_t Mailbox::progress() const {
  const Traffic traffic = stats();
  return traffic.messages_sent + traffic.messages_received;
}

void Mailbox::close(milliseconds timeout) {
  if (!impl_->fork_guard.in_child()) impl_->close(timeout);
}

}  // namespace smp::mailbox
