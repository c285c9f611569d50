#include "csrc/shm/shared_memory.h"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <random>
#include <type_traits>
#include <utility>

#include "csrc/common/check.h"
#include "csrc/common/log.h"
#include "csrc/shm/shared_segment.h"

namespace smp::shm {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kFileSlice{200};
// Value in place of an errno: the pair does not try.
constexpr int32_t kNotTried = -1;

void wait_for(comm::Work& work, health::FaultBoard& faults,
              milliseconds timeout) {
  const Clock::time_point begin = Clock::now();
  while (true) {
    const Clock::time_point slice_begin = Clock::now();
    try {
      return work.wait(std::min(kFileSlice, timeout));
    } catch (const Error&) {
      faults.raise_if_faulted();
      // A time-out and a failure have one type of error; a failure comes early.
      const Clock::time_point now = Clock::now();
      if (now - slice_begin < kFileSlice || now - begin >= timeout) throw;
      faults.check_interrupt();
    }
  }
}

// Returns the `count` records of each rank, one rank after the other.
// Collective.
template <typename Record>
std::vector<Record> exchange(comm::Communicator& world,
                             health::FaultBoard& faults, const Record* own,
                             int64_t count, milliseconds timeout) {
  static_assert(std::is_trivially_copyable_v<Record>);
  const auto bytes = count * static_cast<int64_t>(sizeof(Record));
  const at::TensorOptions options(at::kByte);
  const at::Tensor input = at::empty({bytes}, options);
  std::memcpy(input.mutable_data_ptr(), own, static_cast<size_t>(bytes));
  const at::Tensor output = at::empty({world.size() * bytes}, options);
  wait_for(*world.all_gather(output, input), faults, timeout);
  std::vector<Record> all(static_cast<size_t>(world.size() * count));
  std::memcpy(all.data(), output.const_data_ptr(), output.nbytes());
  return all;
}

// A rank's first message, before it makes any segment.
struct RankClaim {
  uint64_t machine;
  int64_t ring_bytes;  // 0: it shares nothing
};

// The place of a rank's segment.
struct FileOffer {
  SegmentStamp stamp;
  int32_t pid;
  int32_t fd;
  int32_t error;  // errno of making it, or kNotTried
};

FileOffer make_offer(int64_t num_rings, int64_t ring_bytes, health::OwnedFd& fd,
                     SharedSegment& segment) {
  FileOffer offer{{{}, ring_bytes, num_rings}, ::getpid(), -1, kNotTried};
  if (num_rings == 0) return offer;
  std::random_device random;
  for (uint64_t& word : offer.stamp.token) {
    word = uint64_t{random()} << 32 | random();
  }
  offer.error = SharedSegment::make_file(offer.stamp, fd, segment);
  offer.fd = fd.get();
  return offer;
}

// Returns the ranks that try to share memory with `rank`, ascending.
std::vector<int> candidates_of(int rank, const std::vector<RankClaim>& claims) {
  std::vector<int> result;
  const RankClaim& own = claims[rank];
  for (int i = 0; i < static_cast<int>(claims.size()); ++i) {
    if (i != rank && own.ring_bytes > 0 && claims[i].ring_bytes > 0 &&
        claims[i].machine == own.machine) {
      result.push_back(i);
    }
  }
  return result;
}

// Returns the index of the ring in which `owner` receives from `sender`.
int64_t ring_index(int owner, int sender,
                   const std::vector<RankClaim>& claims) {
  const std::vector<int> senders = candidates_of(owner, claims);
  return std::find(senders.begin(), senders.end(), sender) - senders.begin();
}

std::string reason_text(int rank, int other, int32_t error,
                        const FileOffer& others_offer) {
  const std::string of = " of global_rank " + std::to_string(other);
  if (others_offer.error > 0) {
    return detail::concat("global_rank ", other, " cannot make shared memory: ",
                          std::strerror(others_offer.error));
  }
  const std::string hint =
      error == ENOENT || error == ESTALE
          ? " (ranks in containers of their own need one process namespace)"
          : "";
  return detail::concat("global_rank ", rank, " cannot open the memory", of,
                        ": ", std::strerror(error), hint);
}

// Logs one line on rank 0 when ranks of one machine do not share memory
// although some of them have it enabled.
void log_failures(const std::string& world_name,
                  const std::vector<RankClaim>& claims,
                  const std::vector<FileOffer>& offers,
                  const std::vector<int32_t>& verdicts) {
  const int size = static_cast<int>(claims.size());
  int num_pairs = 0;
  std::string first;
  for (int i = 0; i < size; ++i) {
    for (int j = 0; j < size; ++j) {
      if (i == j || claims[i].machine != claims[j].machine) continue;
      const bool i_wants = claims[i].ring_bytes > 0;
      const bool j_wants = claims[j].ring_bytes > 0;
      if (!i_wants) continue;
      const int32_t verdict = verdicts[i * size + j];
      if (j_wants && verdict == 0) continue;
      ++num_pairs;
      if (!first.empty()) continue;
      first = j_wants ? reason_text(i, j, verdict, offers[j])
                      : detail::concat("global_rank ", j, " has SMP_SHM=0");
    }
  }
  if (num_pairs == 0) return;
  SMP_LOG(kWarning, "ranks of one machine exchange messages over ", world_name,
          " instead of shared memory, which is slower: ", first,
          num_pairs > 1 ? detail::concat(" (and ", num_pairs - 1, " more)")
                        : std::string());
}

}  // namespace

SharedMemory::SharedMemory(std::vector<Mapping> mappings, Doorbell* own_bells,
                           std::vector<Peer> peers)
    : mappings_(std::move(mappings)),
      own_bells_(own_bells),
      peers_(std::move(peers)) {
  for (const Peer& peer : peers_) peer_ranks_.push_back(peer.global_rank);
}

std::vector<int> SharedMemory::peers() const { return peer_ranks_; }

std::vector<SharedMemory::Peer> SharedMemory::take_peers() {
  SMP_CHECK(!std::exchange(is_taken_, true),
            "this shared memory belongs to a mailbox already; make another one "
            "with connect_shared_memory");
  return std::move(peers_);
}

SharedMemoryPtr connect_shared_memory(comm::Communicator& world,
                                      health::FaultBoard& faults,
                                      const SharedMemoryOptions& options) {
  const int self = world.group_rank();
  const int size = world.size();
  SMP_CHECK_VALUE(options.ring_bytes > 0,
                  "a ring in shared memory needs more than 0 bytes, got ",
                  options.ring_bytes);
  const RankClaim claim{std::hash<std::string>{}(options.machine),
                        options.enabled ? options.ring_bytes : 0};
  const auto claims = exchange(world, faults, &claim, 1, options.timeout);

  const std::vector<int> candidates = candidates_of(self, claims);
  health::OwnedFd fd;
  SharedSegment own;
  const FileOffer offer = make_offer(static_cast<int64_t>(candidates.size()),
                                     options.ring_bytes, fd, own);
  const auto offers = exchange(world, faults, &offer, 1, options.timeout);

  std::vector<int32_t> row(size, kNotTried);
  std::vector<SharedSegment> segments(size);
  for (const int other : candidates) {
    const FileOffer& theirs = offers[other];
    row[other] = theirs.error != 0
                     ? theirs.error
                     : SharedSegment::open(theirs.pid, theirs.fd, theirs.stamp,
                                           segments[other]);
  }
  const auto verdicts =
      exchange(world, faults, row.data(), size, options.timeout);
  if (self == 0) log_failures(world.name(), claims, offers, verdicts);

  std::vector<SharedMemory::Mapping> mappings;
  std::vector<SharedMemory::Peer> peers;
  for (const int other : candidates) {
    if (row[other] != 0 || verdicts[other * size + self] != 0) continue;
    const SharedSegment& theirs = segments[other];
    mappings.push_back(theirs.mapping());
    peers.push_back({other,
                     {theirs.ring(ring_index(other, self, claims)),
                      theirs.bells() + SharedMemory::kReceiveBell},
                     {own.ring(ring_index(self, other, claims)),
                      theirs.bells() + SharedMemory::kSendBell}});
  }
  Doorbell* own_bells = nullptr;
  if (!peers.empty()) {
    own_bells = own.bells();
    mappings.push_back(own.mapping());
  }
  return std::make_shared<SharedMemory>(std::move(mappings), own_bells,
                                        std::move(peers));
}

}  // namespace smp::shm
