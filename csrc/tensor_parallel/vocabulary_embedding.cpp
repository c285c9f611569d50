#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "csrc/autograd/once.h"
#include "csrc/common/check.h"
#include "csrc/tensor_parallel/region_call.h"
#include "csrc/tensor_parallel/vocabulary.h"

namespace smp::tensor_parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct EmbeddingCall {
  at::Tensor ids;
  int64_t begin;
  int64_t num_rows;
  int64_t padding_id;

  at::Tensor elsewhere() const {
    return ids.lt(begin).logical_or_(ids.ge(begin + num_rows));
  }
};

struct Embedding : torch::autograd::Function<Embedding> {
  static at::Tensor forward(AutogradContext* context, const EmbeddingCall& call,
                            const at::Tensor& table) {
    keep(context, call);
    const at::Tensor elsewhere = call.elsewhere();
    const at::Tensor rows = call.ids.sub(call.begin).masked_fill_(elsewhere, 0);
    return at::embedding(table, rows).masked_fill_(elsewhere.unsqueeze(-1), 0);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const EmbeddingCall& call = kept<EmbeddingCall>(context);
    at::Tensor d_table;
    {
      at::NoGradGuard no_grad;
      at::Tensor nowhere = call.elsewhere();
      if (call.padding_id >= 0) {
        nowhere.logical_or_(call.ids.eq(call.padding_id));
      }
      // There is one row more, which takes no gradient.
      const at::Tensor rows =
          call.ids.sub(call.begin).masked_fill_(nowhere, call.num_rows);
      d_table = at::embedding_dense_backward(with_data(grads[0]), rows,
                                             call.num_rows + 1,
                                             /*padding_idx=*/call.num_rows,
                                             /*scale_grad_by_freq=*/false)
                    .narrow(0, 0, call.num_rows);
    }
    return autograd::once("vocabulary_embedding",
                          {at::Tensor(), std::move(d_table)}, grads);
  }
};

}  // namespace

at::Tensor vocabulary_embedding(const at::Tensor& ids, const at::Tensor& table,
                                int64_t begin, int64_t padding_id) {
  SMP_CHECK_VALUE(table.dim() == 2 && table.size(0) > 0,
                  "vocabulary_embedding: expected a table [rows, features], "
                  "got shape ",
                  table.sizes());
  SMP_CHECK_VALUE(
      ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt,
      "vocabulary_embedding: expected integer ids, got ", ids.scalar_type());
  return Embedding::apply(EmbeddingCall{ids, begin, table.size(0), padding_id},
                          table);
}

}  // namespace smp::tensor_parallel
