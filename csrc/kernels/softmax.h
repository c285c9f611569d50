#pragma once

#include <cstdint>

#include "csrc/kernels/counter_hash.h"
#include "csrc/kernels/multi_array.h"

// Attention probabilities and cross entropy: softmax over rows. Raw pointers
// only: callers check and allocate. "Compute" is double for kDouble and float
// otherwise.

namespace smp::kernels {

/// probs = softmax(scale * scores + mask - slope * |query - key|) over the keys
/// that a query may see; y = dropout(probs). A query without any key has
/// probabilities 0. With `is_causal` the last query sees all keys, earlier ones
/// see fewer; with a window only the last `window` of those.
struct ScaledMaskedSoftmax {
  const void* scores = nullptr;  // [batch, heads, queries, keys]
  const void* mask = nullptr;    // Compute, by strides; keys lie together
  const void* slopes = nullptr;  // Compute [heads]
  void* probs = nullptr;         // as scores
  void* y = nullptr;             // as scores; null without dropout
  int64_t batch_size = 0;
  int64_t num_heads = 0;
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  int64_t mask_batch_stride = 0;  // in elements; 0 where the mask is shared
  int64_t mask_head_stride = 0;
  int64_t mask_query_stride = 0;
  double scale = 1;
  bool is_causal = false;
  int64_t window = 0;  // 0: none
  Dropout dropout;
  Dtype dtype = Dtype::kFloat;
};

struct ScaledMaskedSoftmaxBackward {
  const void* dy = nullptr;     // [rows, keys], rows = batch, heads, queries
  const void* probs = nullptr;  // as forward wrote them
  void* dscores = nullptr;
  int64_t num_rows = 0;
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  double scale = 1;
  bool is_causal = false;
  int64_t window = 0;
  Dropout dropout;
  Dtype dtype = Dtype::kFloat;
};

/// The range of keys [begin, end) that a query may see.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

SMP_HOST_DEVICE SMP_INLINED KeyRange visible_keys(int64_t query,
                                                  int64_t num_queries,
                                                  int64_t num_keys,
                                                  bool is_causal,
                                                  int64_t window) {
  KeyRange range = {0, num_keys};
  if (is_causal) {
    range.end = query + 1 + num_keys - num_queries;
    if (range.end < 0) range.end = 0;
    if (window > 0 && range.end > window) range.begin = range.end - window;
  }
  return range;
}

/// The cross entropy of one row, computed from a part of its logits. For a
/// whole row: loss = log(exp_sum) - target_logit. For parts, with M = max of
/// the maxima: the row has the sums of exp_sum * exp(max - M), of target_logit
/// + max - M where the target is, and of sum + columns * (max - M). The
/// target's logit is NaN for a target that is neither in the vocabulary nor to
/// be ignored.
struct CrossEntropy {
  const void* logits = nullptr;      // [rows, columns]
  const int64_t* targets = nullptr;  // [rows]
  void* max = nullptr;               // Compute [rows]
  void* exp_sum = nullptr;           // sum of exp(logit - max)
  void* target_logit = nullptr;  // logit of the target - max, 0: not in here
  void* sum = nullptr;           // sum of (logit - max); null: not wanted
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  int64_t row_stride = 0;    // in elements
  int64_t first_column = 0;  // number of the first column in the vocabulary
  int64_t vocab_size = 0;
  int64_t ignore_index = -100;
  Dtype dtype = Dtype::kFloat;
};

/// dlogits = dloss * (exp(logit - max) / exp_sum - (1 - label_smoothing) at the
/// target - label_smoothing / vocab_size), 0 in rows to be ignored. `max` and
/// `exp_sum` are those of whole rows. May be done in place.
struct CrossEntropyBackward {
  const void* dloss = nullptr;   // Compute [rows]
  const void* logits = nullptr;  // [rows, columns]
  const int64_t* targets = nullptr;
  const void* max = nullptr;      // Compute [rows]
  const void* exp_sum = nullptr;  // Compute [rows]
  void* dlogits = nullptr;        // [rows, columns], contiguous
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  int64_t row_stride = 0;  // of logits
  int64_t first_column = 0;
  int64_t ignore_index = -100;
  int64_t vocab_size = 0;
  double label_smoothing = 0;
  Dtype dtype = Dtype::kFloat;
};

/// Functions on all rows, queued on `stream`. They return nullptr, or the text
/// of the error.
namespace cuda {

const char* softmax_forward(const ScaledMaskedSoftmax& op, void* stream);
const char* softmax_backward(const ScaledMaskedSoftmaxBackward& op,
                             void* stream);
const char* cross_entropy_forward(const CrossEntropy& op, void* stream);
const char* cross_entropy_backward(const CrossEntropyBackward& op,
                                   void* stream);

}  // namespace cuda

}  // namespace smp::kernels
