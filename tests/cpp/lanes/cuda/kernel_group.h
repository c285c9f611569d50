#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "csrc/comm/communicator.h"
#include "csrc/lanes/meeting_copies.h"

namespace smp::lanes {

/// Place where the kernels of a channel's two ranks meet, in memory that
/// processes share.
struct KernelPlace {
  static constexpr int64_t kPieceBytes = 16 << 10;

  std::atomic<uint64_t> num_filled{0};   // pieces
  std::atomic<uint64_t> num_emptied{0};  // likewise
  std::atomic<uint64_t> num_begun[2]{};  // kernels of either rank
  std::atomic<int64_t> num_bytes[2]{};   // of the last one
  uint8_t piece[kPieceBytes];
};

/// The places of all channels; made before processes are forked.
class KernelPlaces {
 public:
  KernelPlaces(int num_ranks, int num_channels);
  ~KernelPlaces();
  KernelPlaces(const KernelPlaces&) = delete;
  KernelPlaces& operator=(const KernelPlaces&) = delete;

  KernelPlace& of(const CopyChannel& channel) { return *places_.at(channel); }

 private:
  size_t size_ = 0;
  void* begin_ = nullptr;
  std::map<CopyChannel, KernelPlace*> places_;
};

/// Makes one rank of a group that behaves as one of NCCL with two ranks: it has
/// a stream of its own, its kernels occupy that stream until both ranks have
/// theirs, keeps no tensor, and ends kernels by `abort`.
comm::CommunicatorPtr make_kernel_group(KernelPlace& place, int group_rank,
                                        c10::Device device);

}  // namespace smp::lanes
