#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "csrc/checkpoint/file_reader.h"
#include "csrc/checkpoint/file_writer.h"
#include "csrc/checkpoint/slice_plan.h"

namespace smp::checkpoint {

/// Appends the bytes of a contiguous tensor. A tensor on the CPU must not
/// change before the writer has finished; a tensor on another device is copied
/// straight into the buffers of the writer, piece by piece.
/// @throws ValueError if it is not contiguous; Error as FileWriter::append
void append_tensor(FileWriter& writer, const at::Tensor& tensor);

/// Fills a contiguous CPU tensor with the bytes of the file from `offset` on.
/// @throws as FileReader::read; ValueError for another kind of tensor
void read_tensor(FileReader& reader, int64_t offset, const at::Tensor& into);

/// Executes one read of a plan: out of the block that begins at byte
/// `block_offset`, into a contiguous CPU tensor of the block's dtype that holds
/// the wanted part.
/// @throws as read_tensor; ValueError if the plan leaves the tensor
void read_slice(FileReader& reader, const SliceRead& read, int64_t block_offset,
                const at::Tensor& into);

/// Copies `from`, on any device, into a CPU tensor of its sizes and dtype, past
/// the caches where both lie alike in memory (`copy_streamed`).
/// @throws ValueError for other sizes, another dtype or another device
void copy_tensor(const at::Tensor& into, const at::Tensor& from);

}  // namespace smp::checkpoint
