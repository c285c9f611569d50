#include "tests/cpp/lanes/cuda/kernel_group.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "csrc/common/check.h"
#include "csrc/memory/device_scope.h"
#include "tests/cpp/cuda_runtime/fake_cuda.h"

namespace smp::lanes {
namespace {

constexpr std::chrono::microseconds kLookEvery{30};

using Aborted = std::shared_ptr<std::atomic<bool>>;

bool wait_until(const Aborted& is_aborted,
                const std::function<bool()>& condition) {
  while (!condition()) {
    if (*is_aborted || fake_cuda::is_frozen()) return false;
    std::this_thread::sleep_for(kLookEvery);
  }
  return true;
}

struct Kernel {
  KernelPlace& place;
  int group_rank;
  bool is_send;
  void* data;
  int64_t num_bytes;
  uint64_t number;  // among this rank's of the channel
  Aborted is_aborted;

  void run() const {
    uint8_t* const bytes = num_bytes > 0 ? fake_cuda::view(data) : nullptr;
    const int other = 1 - group_rank;
    if (!is_send) std::memset(bytes, 0xff, static_cast<size_t>(num_bytes));
    place.num_bytes[group_rank] = num_bytes;
    place.num_begun[group_rank] = number;
    if (!wait_until(is_aborted,
                    [&] { return place.num_begun[other] >= number; })) {
      return;
    }
    if (place.num_bytes[other] != num_bytes) std::abort();
    for (int64_t at = 0; at < num_bytes; at += KernelPlace::kPieceBytes) {
      const auto size = static_cast<size_t>(
          std::min(KernelPlace::kPieceBytes, num_bytes - at));
      if (!(is_send ? fill(bytes + at, size) : empty(bytes + at, size))) return;
    }
  }

  bool fill(const uint8_t* bytes, size_t size) const {
    std::memcpy(place.piece, bytes, size);
    const uint64_t filled = ++place.num_filled;
    return wait_until(is_aborted, [&] { return place.num_emptied >= filled; });
  }
  bool empty(uint8_t* bytes, size_t size) const {
    const uint64_t next = place.num_emptied + 1;
    if (!wait_until(is_aborted, [&] { return place.num_filled >= next; })) {
      return false;
    }
    std::memcpy(bytes, place.piece, size);
    place.num_emptied = next;
    return true;
  }
};

class KernelWork final : public comm::Work {
 public:
  KernelWork(std::shared_ptr<c10::Event> end, c10::Device device,
             Aborted is_aborted)
      : end_(std::move(end)),
        device_(device),
        is_aborted_(std::move(is_aborted)) {}

  bool done() override { return *is_aborted_ || end_->query(); }
  void wait(std::chrono::milliseconds /*timeout*/) override {
    SMP_CHECK(false, "the host waits for a device");
  }
  bool order_stream() override {
    SMP_CHECK(!*is_aborted_, "send or recv: aborted");
    end_->block(*memory::current_stream(device_));
    return true;
  }

 private:
  const std::shared_ptr<c10::Event> end_;
  const c10::Device device_;
  const Aborted is_aborted_;
};

class KernelGroup final : public comm::Communicator {
 public:
  KernelGroup(KernelPlace& place, int group_rank, c10::Device device)
      : place_(place),
        group_rank_(group_rank),
        device_(device),
        stream_(c10::impl::VirtualGuardImpl(device.type())
                    .getStreamFromGlobalPool(device)) {}

  int group_rank() const override { return group_rank_; }
  int size() const override { return 2; }
  const std::string& name() const override { return name_; }
  bool is_stream_ordered() const override { return true; }

  comm::WorkPtr send(const at::Tensor& tensor, int dst, int /*tag*/) override {
    SMP_CHECK(dst == 1 - group_rank_, "a rank sends to itself");
    return ask(tensor, true);
  }
  comm::WorkPtr recv(at::Tensor tensor, int src, int /*tag*/) override {
    SMP_CHECK(src == 1 - group_rank_, "a rank receives from itself");
    return ask(tensor, false);
  }
  void abort() override { *is_aborted_ = true; }

  comm::WorkPtr all_reduce(at::Tensor, comm::ReduceOp) override {
    return refuse();
  }
  comm::WorkPtr broadcast(at::Tensor, int) override { return refuse(); }
  comm::WorkPtr all_gather(at::Tensor, const at::Tensor&) override {
    return refuse();
  }
  comm::WorkPtr reduce_scatter(at::Tensor, const at::Tensor&,
                               comm::ReduceOp) override {
    return refuse();
  }
  comm::WorkPtr all_to_all(at::Tensor, const at::Tensor&) override {
    return refuse();
  }
  comm::WorkPtr all_to_all_v(at::Tensor, const at::Tensor&, const comm::Counts&,
                             const comm::Counts&) override {
    return refuse();
  }
  comm::WorkPtr barrier() override { return refuse(); }

 private:
  static comm::WorkPtr refuse() {
    throw Error("a channel has sends and receives only");
  }

  comm::WorkPtr ask(const at::Tensor& tensor, bool is_send) {
    SMP_CHECK(!*is_aborted_, "aborted");
    const c10::DeviceGuard guard(device_);
    memory::Mark::record(*memory::current_stream(device_)).block(stream_);
    const Kernel kernel{place_,
                        group_rank_,
                        is_send,
                        tensor.mutable_data_ptr(),
                        static_cast<int64_t>(tensor.nbytes()),
                        ++num_kernels_,
                        is_aborted_};
    const cudaError_t status =
        fake_cuda::launch(static_cast<cudaStream_t>(stream_.native_handle()),
                          [kernel] { kernel.run(); });
    SMP_CHECK(status == cudaSuccess,
              "a kernel of the group: ", cudaGetErrorString(status));
    auto end = std::make_shared<c10::Event>(device_.type());
    end->record(stream_);
    return std::make_shared<KernelWork>(std::move(end), device_, is_aborted_);
  }

  KernelPlace& place_;
  const int group_rank_;
  const c10::Device device_;
  const c10::Stream stream_;
  const Aborted is_aborted_ = std::make_shared<std::atomic<bool>>(false);
  uint64_t num_kernels_ = 0;
  const std::string name_ = "kernels:channel";
};

}  // namespace

KernelPlaces::KernelPlaces(int num_ranks, int num_channels) {
  std::vector<CopyChannel> channels;
  for (int src = 0; src < num_ranks; ++src) {
    for (int dst = 0; dst < num_ranks; ++dst) {
      for (int index = 0; src != dst && index < num_channels; ++index) {
        channels.push_back({src, dst, index});
      }
    }
  }
  size_ = channels.size() * sizeof(KernelPlace);
  begin_ = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  SMP_CHECK(begin_ != MAP_FAILED, "no memory for places");
  auto* place = static_cast<KernelPlace*>(begin_);
  for (const CopyChannel& channel : channels) {
    places_[channel] = new (place++) KernelPlace;
  }
}

KernelPlaces::~KernelPlaces() { ::munmap(begin_, size_); }

comm::CommunicatorPtr make_kernel_group(KernelPlace& place, int group_rank,
                                        c10::Device device) {
  return std::make_shared<KernelGroup>(place, group_rank, device);
}

}  // namespace smp::lanes
