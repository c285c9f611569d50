#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "csrc/tensor_parallel/regions.h"

namespace smp::tensor_parallel {

/// Looks up ids of any shape in rows [begin, begin + rows of `table`) of a
/// table that is split along the vocabulary; other ids give rows of zeros and
/// no gradient. Not summed over the ranks. The backward is deterministic on the
/// host.
/// @param padding_id  has its row, but no gradient; -1: none
at::Tensor vocabulary_embedding(const at::Tensor& ids, const at::Tensor& table,
                                int64_t begin, int64_t padding_id);

struct CrossEntropyOptions {
  int64_t begin = 0;       ///< first vocabulary entry of this rank
  int64_t vocab_size = 0;  ///< of all ranks
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;  ///< as in torch's cross_entropy
};

/// Returns, per token, the cross entropy of logits [tokens, entries of this
/// rank] whose vocabulary is split; 0 where the target is ignored. Computed in
/// float32, or float64 for such logits. Three numbers per token are exchanged
/// in forward, nothing in backward, and nothing as large as the logits is kept.
at::Tensor vocabulary_cross_entropy(const GroupPtr& group,
                                    const at::Tensor& logits,
                                    const at::Tensor& targets,
                                    const CrossEntropyOptions& options);

}  // namespace smp::tensor_parallel
