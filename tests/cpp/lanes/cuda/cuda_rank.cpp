#include "tests/cpp/lanes/cuda/cuda_rank.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/memory/device_scope.h"
#include "tests/cpp/cuda_runtime/fake_cuda.h"
#include "tests/cpp/cuda_runtime/torch_device.h"

namespace smp::lanes {
namespace {

using memory::MarkedTensor;
using std::chrono::microseconds;

constexpr std::array kDtypes = {at::kFloat, at::kBFloat16, at::kDouble,
                                at::kLong,  at::kByte,     at::kHalf,
                                at::kInt,   at::kBool,     at::kComplexFloat};
const std::vector<std::vector<int64_t>> kSizes = {
    {1}, {}, {7}, {3, 5}, {64, 31}, {2, 3, 4, 5}, {1000}, {40, 50}, {1, 333}};

constexpr microseconds kWait{200};  // for letters

bool is_transposed(int index) { return index % 7 == 4; }

}  // namespace

c10::Device begin_rank(const Links& links, const CudaRankOptions& options) {
  fake_cuda::begin_process(options.seed * 10 + links.rank(), options.max_us);
  const c10::Device device =
      fake_cuda::torch_device(links.rank() % options.num_devices);
  memory::enter_device(device);  // as smp.init does
  return device;
}

CudaRank::CudaRank(Links& links, const CudaRankOptions& options,
                   c10::Device device)
    : links_(links), device_(device) {
  comm::FlightWatch::Options watched{.look_every =
                                         std::chrono::milliseconds(1)};
  watched.begin_thread = [device] { memory::enter_device(device); };
  flights_ = std::make_shared<comm::FlightWatch>(links.board(), watched);
  LaneSource source{.make = {}, .needs_agreement = true};
  source.make = [&](c10::Device where, int rank, const auto& faults,
                    const auto& /*receipts*/) {
    LaneParts parts{.ring = options.ring,
                    .channels = {.num_channels = options.num_channels},
                    .why_no_copies = "not in this test",
                    .why_no_meetings = "not in this test"};
    if (options.has_ring) {
      parts.copies = make_cuda_copies(where, parts.why_no_copies);
    }
    if (options.places != nullptr) {
      GroupOptions groups{.flights = flights_};
      groups.make = [where, rank,
                     places = options.places](const CopyChannel& channel) {
        return make_kernel_group(places->of(channel),
                                 channel.src == rank ? 0 : 1, where);
      };
      parts.meetings = make_group_copies(where, rank, groups, faults);
    }
    return parts;
  };
  LaneOptions lanes{.device = device,
                    .source = source,
                    .machine = "here",
                    .ring = options.ring};
  table_ = std::make_unique<LaneTable>(
      lanes, links.rank(), links.board(),
      [this](int dst, const Receipt& receipt) {
        links_.send(dst, {.kind = Letter::Kind::kReceipt,
                          .descriptor = {.lane = receipt.lane,
                                         .slot = receipt.slot,
                                         .sequence = receipt.sequence}});
      });
  table_->agree(
      [this](const std::string& own) { return links_.exchange(own); });
  receiver_ = std::thread([this] { run([this] { receive(); }); });
  if (options.places != nullptr) {
    taker_ = std::thread([this] { run([this] { take_tensors(); }); });
  }
}

// Handles receipts until the lanes have stopped, like the mailbox.
CudaRank::~CudaRank() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  table_->stop();  // ends a `take` that is blocked
  {
    const std::lock_guard lock(mutex_);
    has_stopped_ = true;
  }
  receiver_.join();
  if (taker_.joinable()) taker_.join();
}

LaneKind CudaRank::post(int dst, const at::Tensor& data, bool is_stable) {
  Posted posted = table_->post(dst, data, is_stable);
  const LaneKind lane = posted.descriptor.lane;
  {
    const std::lock_guard lock(leaving_mutex_);
    const memory::Mark mark = posted.payload.mark;
    leaving_[dst].push_back({std::move(posted), mark});
  }
  send_what_may_leave();
  return lane;
}

// A letter asks for its turn when it could leave otherwise, like a message.
bool CudaRank::may_leave(int dst, Leaving& first) {
  if (!first.mark.is_over()) return false;
  if (!std::exchange(first.has_asked, true) &&
      has_turns(first.posted.descriptor.lane)) {
    first.mark = table_->ask_to_leave(dst, 1);
  }
  return first.mark.is_over();
}

void CudaRank::send_what_may_leave() {
  const std::lock_guard lock(leaving_mutex_);
  for (auto& [dst, posts] : leaving_) {
    while (!posts.empty() && may_leave(dst, posts.front())) {
      const Posted& first = posts.front().posted;
      Letter letter{.kind = Letter::Kind::kTensor,
                    .descriptor = first.descriptor};
      if (const at::Tensor& payload = first.payload.data; payload.defined()) {
        letter.bytes.assign(static_cast<const char*>(payload.const_data_ptr()),
                            payload.nbytes());
      }
      links_.send(dst, letter);
      posts.pop_front();
    }
  }
}

bool CudaRank::are_leaving() {
  const std::lock_guard lock(leaving_mutex_);
  return std::any_of(leaving_.begin(), leaving_.end(),
                     [](const auto& one) { return !one.second.empty(); });
}

void CudaRank::flush() {
  while (are_leaving()) turn();
}

CudaRank::Arrival CudaRank::take(int src, Letter letter) {
  const Descriptor& what = letter.descriptor;
  at::Tensor payload = table_->new_payload(what);
  if (payload.defined()) {
    SMP_CHECK(payload.nbytes() == letter.bytes.size(), "a letter with ",
              letter.bytes.size(), " bytes");
    std::memcpy(payload.mutable_data_ptr(), letter.bytes.data(),
                letter.bytes.size());
  }
  return {src, table_->take(src, what, std::move(payload))};
}

bool CudaRank::turn() {
  raise_if_failed();
  send_what_may_leave();
  std::unique_lock lock(mutex_);
  const auto has_come = [this] {
    return taker_.joinable() ? !arrivals_.empty() : !letters_.empty();
  };
  if (!changed_.wait_for(lock, kWait, has_come)) return false;
  Arrival arrival;
  if (taker_.joinable()) {
    arrival = std::move(arrivals_.front());
    arrivals_.pop_front();
  } else {
    auto [src, letter] = std::move(letters_.front());
    letters_.pop_front();
    lock.unlock();
    arrival = take(src, std::move(letter));
  }
  came[arrival.src].push_back(std::move(arrival.tensor));
  return true;
}

void CudaRank::raise_if_failed() const {
  {
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }
  links_.board()->raise_if_faulted();
}

int CudaRank::num_receipts() const {
  const std::lock_guard lock(mutex_);
  return num_receipts_;
}

// ------------------------------------------------------------------- threads

void CudaRank::run(const std::function<void()>& body) {
  try {
    memory::enter_device(device_);
    body();
  } catch (const std::exception&) {
    const std::lock_guard lock(mutex_);
    // A `take` ends because its lane ends, and threads see faults as well.
    if (!is_ending_ && !links_.board()->fault()) {
      error_ = std::current_exception();
    }
  }
}

// Ends when no letter is left, so that the next lanes get none of these.
void CudaRank::receive() {
  while (true) {
    bool is_ending = false;
    bool has_stopped = false;
    {
      const std::lock_guard lock(mutex_);
      is_ending = is_ending_;
      has_stopped = has_stopped_;
    }
    if (!is_ending) send_what_may_leave();
    auto letter = links_.next(kWait);
    if (!letter && has_stopped) return;
    if (!letter) continue;
    const Letter& content = letter->second;
    const bool is_receipt = content.kind == Letter::Kind::kReceipt;
    if (is_receipt) {
      const Descriptor& what = content.descriptor;
      table_->acknowledge(letter->first, {what.lane, what.slot, what.sequence});
    }
    {
      const std::lock_guard lock(mutex_);
      if (is_receipt) {
        ++num_receipts_;
      } else {
        letters_.push_back(*std::move(letter));
      }
    }
    changed_.notify_all();
  }
}

// Takes tensors in the order of their letters.
void CudaRank::take_tensors() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_ending_ || !letters_.empty(); });
    if (is_ending_) return;
    auto [src, letter] = std::move(letters_.front());
    letters_.pop_front();
    lock.unlock();
    Arrival arrival = take(src, std::move(letter));
    lock.lock();
    arrivals_.push_back(std::move(arrival));
    changed_.notify_all();
  }
}

// ------------------------------------------------------------------- tensors

at::Tensor expected_tensor(int src, int dst, int index, uint64_t seed) {
  std::seed_seq mixed{seed, static_cast<uint64_t>(src),
                      static_cast<uint64_t>(dst), static_cast<uint64_t>(index)};
  std::mt19937 random(mixed);
  const at::ScalarType dtype = kDtypes[random() % kDtypes.size()];
  at::Tensor tensor = at::empty(kSizes[random() % kSizes.size()], dtype);
  auto* const bytes = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  for (size_t i = 0; i < tensor.nbytes(); ++i) {
    bytes[i] = static_cast<uint8_t>(dtype == at::kBool ? random() % 2
                                                       : random() % 251);
  }
  return tensor;
}

void expect_bytes(const CudaRank& rank, MarkedTensor came,
                  const at::Tensor& expected) {
  const at::Tensor data = std::move(came).use();
  ASSERT_EQ(data.sizes(), expected.sizes());
  ASSERT_EQ(data.scalar_type(), expected.scalar_type());
  const at::Tensor host = at::empty(
      data.sizes(), at::TensorOptions(data.scalar_type()).pinned_memory(true));
  host.copy_(data, /*non_blocking=*/true);
  const auto end = memory::Mark::record(*memory::current_stream(data.device()));
  while (!end.is_over()) {
    rank.raise_if_failed();
    std::this_thread::sleep_for(microseconds(50));
  }
  EXPECT_EQ(std::memcmp(host.const_data_ptr(), expected.const_data_ptr(),
                        expected.nbytes()),
            0)
      << "other bytes in " << expected.toString() << expected.sizes();
}

namespace {

// Makes the tensor late, on the current stream.
at::Tensor late_tensor(const at::Tensor& host, int index, c10::Device device) {
  const bool turned = is_transposed(index) && host.dim() == 2;
  const at::Tensor packed = turned ? host.t().contiguous() : host;
  const at::Tensor pinned =
      at::empty(packed.sizes(),
                at::TensorOptions(packed.scalar_type()).pinned_memory(true));
  pinned.copy_(packed);
  at::Tensor there = at::empty(
      packed.sizes(), at::TensorOptions(packed.scalar_type()).device(device));
  there.copy_(pinned, /*non_blocking=*/true);
  return turned ? there.t() : there;
}

// Treats a tensor as a step does that has sent it: writes to it, if it may, or
// drops it, and makes another one of its size.
void post_and_reuse(CudaRank& rank, int dst, int index, uint64_t seed) {
  const at::Tensor host =
      expected_tensor(rank.links().rank(), dst, index, seed);
  const bool is_stable = index % 2 == 1;
  {
    const at::Tensor data = late_tensor(host, index, rank.device());
    rank.post(dst, data, is_stable);
    if (!is_stable) data.copy_(at::empty(data.sizes(), data.options()));
  }
  at::empty(host.sizes(),
            at::TensorOptions(host.scalar_type()).device(rank.device()));
}

void expect_first(CudaRank& rank, int src, int index, uint64_t seed) {
  MarkedTensor first = std::move(rank.came[src].front());
  rank.came[src].pop_front();
  SCOPED_TRACE(detail::concat("tensor ", index, " from global_rank ", src));
  expect_bytes(rank, std::move(first),
               expected_tensor(src, rank.links().rank(), index, seed));
}

}  // namespace

void exchange_tensors(CudaRank& rank, int num_tensors, uint64_t seed) {
  constexpr size_t kNumLate = 3;  // tensors that came and are read later
  const int own = rank.links().rank();
  const int size = rank.links().size();
  std::map<int, int> num_read;
  const auto read = [&](size_t num_left) {
    for (auto& [src, tensors] : rank.came) {
      while (tensors.size() > num_left) {
        expect_first(rank, src, num_read[src]++, seed);
      }
    }
  };
  const auto num_missing = [&] {
    int missing = num_tensors * (size - 1);
    for (const auto& [src, number] : num_read) missing -= number;
    return missing;
  };
  for (int index = 0; index < num_tensors; ++index) {
    for (int step = 1; step < size; ++step) {
      post_and_reuse(rank, (own + step) % size, index, seed);
    }
    // Tensors are looked at, and taken if that cannot block, at once and late,
    // by turns.
    while (rank.turn() && index % 4 < 2) {
    }
    read(kNumLate);
  }
  rank.flush();
  while (num_missing() > 0) {
    rank.turn();
    read(0);
  }
}

void expect_released(c10::Device device, const CudaRankOptions& options) {
  EXPECT_EQ(fake_cuda::bytes_of_tensors(), 0);
  fake_cuda::empty_cache();
  const fake_cuda::Leaks leaks = fake_cuda::leaks();
  EXPECT_EQ(leaks.num_events, 0);
  EXPECT_EQ(leaks.num_opened, 0) << "memory of other processes is open";
  // A ring lives as long as its process: the next lane reuses it.
  EXPECT_LE(leaks.num_blocks, options.has_ring ? 1 : 0);
  if (leaks.num_blocks > 0) {
    EXPECT_EQ(leaks.devices, std::set<int>{device.index()});
  }
  EXPECT_EQ(leaks.num_bytes, leaks.num_blocks * options.ring.num_slots *
                                 options.ring.slot_bytes);
  EXPECT_EQ(fake_cuda::violations(), std::vector<std::string>{});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

namespace {

// Frees a small tensor that the current stream still has to write to many
// times; the next small tensor of that stream gets its memory.
void keep_stream_busy(c10::Device device) {
  const at::TensorOptions bytes(at::kByte);
  const at::Tensor pinned = at::empty({64}, bytes.pinned_memory(true));
  const at::Tensor written = at::empty({64}, bytes.device(device));
  for (int i = 0; i < 100; ++i) {
    written.copy_(pinned, /*non_blocking=*/true);
  }
}

LaneKind lane_of(const CudaRankOptions& options) {
  if (options.has_ring) return LaneKind::kIpc;
  return options.places != nullptr ? LaneKind::kNccl : LaneKind::kHost;
}

void expect_lane(CudaRank& rank, LaneKind lane) {
  const auto& choices = rank.table().choices().at(rank.links().rank());
  for (int peer = 0; peer < rank.links().size(); ++peer) {
    if (peer == rank.links().rank()) continue;
    EXPECT_EQ(choices.at(peer).kind, lane) << choices.at(peer).reason;
  }
}

}  // namespace

void run_exchange(Links& links, const CudaRankOptions& options, int num_tensors,
                  int num_times) {
  const c10::Device device = begin_rank(links, options);
  std::set<int> contexts{device.index()};
  const c10::impl::VirtualGuardImpl impl(device.type());
  if (options.is_elsewhere) {
    const int elsewhere = (device.index() + 1) % options.num_devices;
    impl.setDevice(fake_cuda::torch_device(elsewhere));
    contexts.insert(elsewhere);
  }
  // Odd ranks work on a stream of their own.
  std::optional<c10::StreamGuard> guard;
  if (links.rank() % 2 == 1 && !options.is_elsewhere) {
    guard.emplace(impl.getStreamFromGlobalPool(device));
  }
  if (options.is_busy && guard) keep_stream_busy(device);
  for (int time = 0; time < num_times; ++time) {
    {
      CudaRank rank(links, options, device);
      expect_lane(rank, lane_of(options));
      exchange_tensors(rank, num_tensors, options.seed + time);
      links.exchange("all have come");
      EXPECT_EQ(rank.table().counters().tensors_received,
                num_tensors * (links.size() - 1));
    }
    links.exchange("the lanes have ended");
  }
  guard.reset();
  EXPECT_EQ(fake_cuda::contexts(), contexts);
  expect_released(device, options);
  links.exchange("looked at");
  links.say_goodbye();
}

// ----------------------------------------------------------------- scenarios

std::vector<Scenario> all_scenarios() {
  return {
      {.name = "ring"},
      {.name = "ring of one slot, four ranks",
       .num_ranks = 4,
       .options = {.ring = {.num_slots = 1, .slot_bytes = 16 << 10}},
       .num_tensors = 25},
      {.name = "small slots",
       .options = {.ring = {.num_slots = 3, .slot_bytes = 2 << 10}}},
      {.name = "rings made again", .num_tensors = 8, .num_times = 4},
      {.name = "two ranks of one device",
       .options = {.num_devices = 1},
       .num_tensors = 40},
      {.name = "another current device",
       .options = {.is_elsewhere = true},
       .num_tensors = 20},
      {.name = "slow streams", .options = {.max_us = 20'000}, .num_tensors = 4},
      {.name = "busy streams",
       .num_ranks = 4,
       .options = {.max_us = 5000, .is_busy = true},
       .num_tensors = 4},
      {.name = "channels",
       .options = {.has_ring = false},
       .num_channels = 2,
       .num_tensors = 40},
      {.name = "channels, four ranks",
       .num_ranks = 4,
       .options = {.has_ring = false},
       .num_channels = 1,
       .num_tensors = 15},
      {.name = "host", .options = {.has_ring = false}, .num_tensors = 30},
  };
}

std::vector<RankEnd> run_scenario(Scenario scenario, uint64_t seed,
                                  std::chrono::seconds patience) {
  const fake_cuda::Machine machine;
  std::optional<KernelPlaces> places;
  if (scenario.num_channels > 0) {
    places.emplace(scenario.num_ranks, scenario.num_channels);
    scenario.options.places = &*places;
    scenario.options.num_channels = scenario.num_channels;
  }
  scenario.options.seed = seed;
  return run_ranks(
      scenario.num_ranks,
      [&](Links& links) {
        run_exchange(links, scenario.options, scenario.num_tensors,
                     scenario.num_times);
      },
      patience);
}

}  // namespace smp::lanes
