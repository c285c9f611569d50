#include "csrc/memory/mark.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "csrc/memory/device_scope.h"

namespace smp::memory {
namespace {

// Uses only generic classes of c10: the build may have no CUDA toolkit.
class StreamEvent final : public Mark::Event {
 public:
  explicit StreamEvent(const c10::Stream& stream)
      : event_(stream.device_type()) {
    event_.record(stream);
  }
  void block(const c10::Stream& stream) const override { event_.block(stream); }
  bool is_over() const override { return event_.query(); }

 private:
  c10::Event event_;
};

}  // namespace

Mark Mark::record(const c10::Stream& stream) {
  return Mark(std::make_shared<StreamEvent>(stream));
}

MarkedTensor MarkedTensor::of_current_stream(at::Tensor data) {
  MarkedTensor result{std::move(data)};
  if (!result.data.defined() || result.data.is_cpu()) return result;
  result.stream = current_stream(result.data.device());
  result.mark = Mark::record(*result.stream);
  return result;
}

at::Tensor MarkedTensor::use() && {
  if (!mark || !data.defined()) return std::move(data);
  const c10::Stream stream =
      current_stream(data.device())
          .value_or(c10::Stream(c10::Stream::DEFAULT, data.device()));
  mark.block(stream);
  // The memory may belong to another stream, and must not be reused before this
  // stream is done with it.
  if (!data.is_cpu()) {
    c10::impl::VirtualGuardImpl(data.device().type())
        .recordDataPtrOnStream(data.storage().data_ptr(), stream);
  }
  return std::move(data);
}

}  // namespace smp::memory
