#include "csrc/lanes/ipc_lane.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <random>
#include <thread>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/lanes/byte_strings.h"
#include "csrc/lanes/never_event.h"
#include "csrc/lanes/plain_tensor.h"

namespace smp::lanes {
namespace {

using memory::Mark;
using memory::MarkedTensor;
using RingClock = std::chrono::steady_clock;

constexpr int64_t kTokenBytes = 64;
// Time for copies in flight when a run ends without a fault.
constexpr std::chrono::seconds kLastCopies{2};

std::string new_token() {
  std::random_device random;
  std::string token(kTokenBytes, '\0');
  for (char& byte : token) byte = static_cast<char>(random());
  return token;
}

}  // namespace

IpcLane::IpcLane(std::unique_ptr<DeviceCopies> copies, RingOptions options,
                 int global_rank, std::shared_ptr<health::FaultBoard> faults,
                 SendReceipt receipts)
    : copies_(std::move(copies)),
      options_(options),
      global_rank_(global_rank),
      faults_(std::move(faults)),
      receipts_(std::move(receipts)),
      slots_(options.num_slots),
      last_reader_(options.num_slots, -1) {}

IpcLane::~IpcLane() { stop(); }

// ------------------------------------------------------------- the agreement

IpcLane::Events IpcLane::new_events() {
  Events events;
  for (int slot = 0; slot < options_.num_slots; ++slot) {
    events.push_back(copies_->new_event());
  }
  return events;
}

// Returns a packed list: ring, token and events of this rank, then for each
// peer its rank and events.
std::string IpcLane::offer(const std::vector<int>& peers) {
  const auto handles_of = [this](const Events& events) {
    std::vector<std::string> handles;
    for (const SharedEventPtr& event : events) {
      handles.push_back(copies_->handle_of(*event));
    }
    return pack(handles);
  };
  ring_ = copies_->allocate(options_.num_slots * options_.slot_bytes);
  const std::string token = new_token();
  copies_->put(ring_.get(), token);
  written_ = new_events();
  std::vector<std::string> parts{copies_->handle_of(ring_), token,
                                 handles_of(written_)};
  for (const int peer : peers) {
    Peer& entry = peers_[peer];
    entry.read_here = new_events();
    parts.push_back(std::to_string(peer));
    parts.push_back(handles_of(entry.read_here));
  }
  return pack(parts);
}

void IpcLane::open(int global_rank, const std::string& offer) {
  Peer& peer = peers_.at(global_rank);
  const std::vector<std::string> parts = unpack(offer);
  const auto open_all = [this](const std::string& handles) {
    Events events;
    for (const std::string& handle : unpack(handles)) {
      events.push_back(copies_->open_event(handle));
    }
    return events;
  };
  SMP_CHECK(parts.size() >= 3, "global_rank ", global_rank,
            " offers no ring of slots");
  peer.ring = copies_->open_memory(parts[0]);
  // Devices may seem to reach each other and yet read wrong numbers.
  SMP_CHECK(copies_->get(peer.ring.get(), kTokenBytes) == parts[1],
            "memory of global_rank ", global_rank,
            "'s device has other bytes when global_rank ", global_rank_,
            " reads it");
  peer.written = open_all(parts[2]);
  for (size_t i = 3; i + 1 < parts.size(); i += 2) {
    if (parts[i] == std::to_string(global_rank_)) {
      peer.read_by_peer = open_all(parts[i + 1]);
    }
  }
  const auto expected = static_cast<size_t>(options_.num_slots);
  SMP_CHECK(
      peer.written.size() == expected && peer.read_by_peer.size() == expected,
      "global_rank ", global_rank, " has ", peer.written.size(), " and ",
      peer.read_by_peer.size(), " events for ", expected, " slots");
}

void IpcLane::use_only(const std::vector<int>& peers) {
  std::erase_if(peers_, [&](const auto& one) {
    return std::find(peers.begin(), peers.end(), one.first) == peers.end();
  });
}

IpcLane::Peer& IpcLane::peer_of(int global_rank) {
  const auto found = peers_.find(global_rank);
  SMP_CHECK(found != peers_.end(), "global_rank ", global_rank_,
            " has not mapped memory of global_rank ", global_rank,
            "'s device, and got a tensor through it; ranks that run different "
            "versions of smp cannot work together");
  return found->second;
}

// ------------------------------------------------------------------- tensors

std::optional<Posted> IpcLane::post(int dst, const at::Tensor& source,
                                    bool is_stable) {
  const at::AutoGradMode no_grad(false);
  const auto num_bytes = static_cast<int64_t>(source.nbytes());
  if (!reaches(dst) || !fits(num_bytes)) return std::nullopt;
  const auto slot = slots_.take(dst);
  if (!slot) return std::nullopt;
  const at::Tensor data = own_plain_tensor(source, is_stable);
  Posted posted;
  {
    std::lock_guard lock(out_mutex_);
    CopyQueue& queue = copies_->outgoing();
    int& reader = last_reader_[slot->index];
    queue.follow_caller();
    if (reader >= 0) {
      queue.wait(*peer_of(reader).read_by_peer[slot->index]);
    }
    reader = dst;
    queue.copy(ring_.get() + slot->index * options_.slot_bytes,
               static_cast<const uint8_t*>(data.const_data_ptr()), num_bytes);
    queue.record(*written_[slot->index]);
    queue.keep(data);
    posted.end = queue.end();
  }
  posted.descriptor = {.lane = LaneKind::kIpc,
                       .slot = slot->index,
                       .sequence = slot->sequence,
                       .num_bytes = num_bytes,
                       .dtype = data.scalar_type(),
                       .sizes = data.sizes().vec()};
  return posted;
}

at::Tensor IpcLane::new_payload(const Descriptor& /*descriptor*/) const {
  return {};
}

MarkedTensor IpcLane::take(int src, const Descriptor& descriptor,
                           at::Tensor /*payload*/) {
  const at::AutoGradMode no_grad(false);
  Peer& peer = peer_of(src);
  arrivals_.check(src, descriptor);
  SMP_CHECK(descriptor.slot >= 0 && descriptor.slot < options_.num_slots &&
                fits(descriptor.num_bytes),
            "global_rank ", src, " has put ", descriptor.num_bytes,
            " bytes into slot ", descriptor.slot, " of ", options_.num_slots,
            " with ", options_.slot_bytes,
            " bytes; set SMP_LANE_SLOT_MB to the same value on all ranks");
  MarkedTensor result;
  {
    std::lock_guard lock(in_mutex_);
    CopyQueue& queue = copies_->incoming();
    result.data = queue.new_tensor(descriptor.sizes, descriptor.dtype);
    if (stopped_) {
      result.mark = never();
      return result;
    }
    queue.wait(*peer.written[descriptor.slot]);
    queue.copy(static_cast<uint8_t*>(result.data.mutable_data_ptr()),
               peer.ring.get() + descriptor.slot * options_.slot_bytes,
               descriptor.num_bytes);
    queue.record(*peer.read_here[descriptor.slot]);
    queue.keep(result.data);
    result.mark = queue.end();
  }
  receipts_(src, {descriptor.lane, descriptor.slot, descriptor.sequence});
  return result;
}

void IpcLane::acknowledge(int src, const Receipt& receipt) {
  slots_.give_back(src, receipt);
}

// ------------------------------------------------------------------- the end

void IpcLane::stop() {
  {
    std::lock_guard lock(in_mutex_);
    if (std::exchange(stopped_, true)) return;
  }
  std::lock_guard lock(out_mutex_);
  const bool can_free = end_copies();
  copies_->stop();
  if (!can_free) release();
}

// Gives copies in flight time to end. @return whether they have, so that the
// device does not access their memory any more; throws nothing, since the
// destructor calls it
bool IpcLane::end_copies() {
  try {
    const Mark last_out = copies_->outgoing().end();
    const Mark last_in = copies_->incoming().end();
    const auto is_over = [&] {
      return last_out.is_over() && last_in.is_over();
    };
    const auto give_up = RingClock::now() + kLastCopies;
    while (!is_over() && !faults_->fault() && RingClock::now() < give_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return is_over();
  } catch (const std::exception&) {
    return false;  // a device that has failed
  }
}

// Keeps memory that a device may still access until the process ends.
void IpcLane::release() {
  struct Kept {
    DeviceMemory ring;
    Events written;
    std::map<int, Peer> peers;
  };
  static auto* const all = new std::vector<Kept>;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  all->push_back({ring_, written_, peers_});
}

}  // namespace smp::lanes
