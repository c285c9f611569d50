#include "csrc/checkpoint/tensor_io.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>

#include "csrc/checkpoint/streamed_copy.h"
#include "csrc/common/check.h"

namespace smp::checkpoint {

namespace {

std::span<std::byte> bytes_of(const at::Tensor& tensor,
                              const std::string& path) {
  SMP_CHECK_VALUE(tensor.is_contiguous() && tensor.device().is_cpu(), path,
                  ": expected a contiguous tensor on the CPU, got one on ",
                  tensor.device().str(),
                  tensor.is_contiguous() ? "" : ", not contiguous");
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

void append_from_device(FileWriter& writer, const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().flatten().view(at::kByte);
  for (int64_t begin = 0; begin < flat.numel();) {
    const auto room = writer.room();
    const int64_t count = std::min<int64_t>(flat.numel() - begin,
                                            static_cast<int64_t>(room.size()));
    at::from_blob(room.data(), {count}, at::kByte)
        .copy_(flat.narrow(0, begin, count));
    writer.advance(static_cast<size_t>(count));
    begin += count;
  }
}

}  // namespace

void append_tensor(FileWriter& writer, const at::Tensor& tensor) {
  SMP_CHECK_VALUE(tensor.is_contiguous(),
                  "expected a contiguous tensor to write, got strides ",
                  tensor.strides());
  if (tensor.device().is_cpu()) {
    writer.append_borrowed(
        {static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes()},
        std::make_shared<const at::Tensor>(tensor));
  } else {
    append_from_device(writer, tensor);
  }
}

void read_tensor(FileReader& reader, int64_t offset, const at::Tensor& into) {
  reader.read(offset, bytes_of(into, reader.path()));
}

void read_slice(FileReader& reader, const SliceRead& read, int64_t block_offset,
                const at::Tensor& into) {
  const auto bytes = bytes_of(into, reader.path());
  const int64_t last = read.dst_offset + (read.num_runs - 1) * read.dst_stride;
  SMP_CHECK_VALUE(
      read.dst_offset >= 0 && last >= 0 && read.run_length >= 0 &&
          std::max(read.dst_offset, last) + read.run_length <= into.numel(),
      reader.path(), ": a read of ", read.num_runs, " times ", read.run_length,
      " elements to ", read.dst_offset, " does not fit a tensor of ",
      into.numel());
  const int64_t item = static_cast<int64_t>(into.element_size());
  const size_t length = static_cast<size_t>(read.run_length * item);
  for (int64_t i = 0; i < read.num_runs; ++i) {
    const int64_t from = read.src_offset + i * read.src_stride;
    const int64_t to = read.dst_offset + i * read.dst_stride;
    reader.read(block_offset + from * item,
                bytes.subspan(static_cast<size_t>(to * item), length));
  }
}

void copy_tensor(const at::Tensor& into, const at::Tensor& from) {
  SMP_CHECK_VALUE(into.device().is_cpu() && into.dtype() == from.dtype() &&
                      into.sizes() == from.sizes(),
                  "expected a CPU tensor of ", from.dtype(), " and sizes ",
                  from.sizes(), " to copy into, got ", into.dtype(), ", ",
                  into.sizes(), " on ", into.device().str());
  const bool are_alike =
      from.device().is_cpu() && from.is_non_overlapping_and_dense() &&
      into.strides() == from.strides() && into.is_conj() == from.is_conj() &&
      into.is_neg() == from.is_neg();
  if (!are_alike) {
    into.copy_(from);
    return;
  }
  copy_streamed(
      {static_cast<std::byte*>(into.data_ptr()), into.nbytes()},
      {static_cast<const std::byte*>(from.data_ptr()), from.nbytes()});
}

}  // namespace smp::checkpoint
