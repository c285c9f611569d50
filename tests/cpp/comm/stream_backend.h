#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "tests/cpp/memory/fake_device.h"
#include "tests/cpp/memory/fake_device_streams.h"

namespace smp::comm {

/// Keeps its tensors as NCCL's works of c10d do: until a stream, whichever it
/// is, comes after the operation.
class StreamBackendWork final : public c10d::Work {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Records the end of the operation, the last one of `stream` so far.
  StreamBackendWork(const c10::Stream& stream, std::shared_ptr<Tensors> kept)
      : device_(stream.device()),
        end_(stream.device_type()),
        kept_(std::move(kept)) {
    end_.record(stream);
  }

  bool isCompleted() override { return end_.query(); }
  bool wait(std::chrono::milliseconds) override {
    end_.block(fake_device::current_stream_of(device_));
    kept_->clear();
    return true;
  }

 private:
  const c10::Device device_;
  c10::Event end_;
  const std::shared_ptr<Tensors> kept_;
};

/// A backend of c10d on a fake device, with a stream of its own: it reads an
/// input when that stream comes to the operation, from memory that may have
/// another owner by then. Each of its ranks holds what this one holds.
class StreamBackend final : public c10d::Backend {
 public:
  StreamBackend(int rank, int size, int device_index)
      : Backend(rank, size), stream_(fake_device::new_stream(device_index)) {}

  const std::string getBackendName() const override { return "nccl"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::AllgatherOptions&) override {
    auto* to = static_cast<char*>(output.mutable_data_ptr());
    const void* from = input.const_data_ptr();
    return begin({output, input},
                 [to, from, num_bytes = input.nbytes(), size = getSize()] {
                   for (int rank = 0; rank < size; ++rank) {
                     std::memcpy(to + rank * num_bytes, from, num_bytes);
                   }
                 });
  }

 private:
  c10::intrusive_ptr<c10d::Work> begin(std::vector<at::Tensor> tensors,
                                       std::function<void()> kernel) {
    c10::Event called(stream_.device_type());
    called.record(fake_device::current_stream_of(stream_.device()));
    called.block(stream_);
    auto kept = std::make_shared<std::vector<at::Tensor>>(std::move(tensors));
    fake_device::ask(stream_, [kept, kernel = std::move(kernel)] { kernel(); });
    return c10::make_intrusive<StreamBackendWork>(stream_, std::move(kept));
  }

  const c10::Stream stream_;
};

}  // namespace smp::comm
