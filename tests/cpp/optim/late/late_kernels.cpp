#include "tests/cpp/optim/late/late_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "csrc/kernels/cpu/fused_table.h"
#include "csrc/kernels/launchers.h"
#include "csrc/optim/chunks.h"

// Numbers are those of the CPU, bit by bit: sums have the same parts.

namespace smp::late_kernels {
namespace {

namespace k = smp::kernels;
using optim::Chunk;

constexpr auto kType = c10::DeviceType::PrivateUse1;
Device the_device;

// The inverse of c10::Stream::hash, which is the native handle.
c10::Stream stream_of(void* handle) {
  const auto bits = reinterpret_cast<uintptr_t>(handle);
  const auto index = static_cast<c10::DeviceIndex>((bits >> 48) & 0xff);
  const auto id = static_cast<int64_t>(bits << 16) >> 16;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), id);
}

// Copies what `work` holds, as a launch of a kernel copies its arguments. The
// memory behind pointers belongs to the stream.
template <typename Work>
const char* ask(void* stream, Work work) {
  the_device.enqueue(stream_of(stream), std::move(work));
  return nullptr;
}

// Replaces addresses of tensors by those that threads of streams may use.
template <typename... Pointers>
void translate(Pointers*&... pointers) {
  const auto one = [](auto*& pointer) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    if (pointer) pointer = static_cast<Pointer>(the_device.touchable(pointer));
  };
  (one(pointers), ...);
}

k::BiasGelu on_stream(k::BiasGelu op) {
  translate(op.x, op.bias, op.dy, op.result);
  return op;
}

k::BiasDropoutResidual on_stream(k::BiasDropoutResidual op) {
  translate(op.x, op.bias, op.residual, op.y);
  return op;
}

k::BiasDropoutResidualBackward on_stream(k::BiasDropoutResidualBackward op) {
  translate(op.dy, op.dx);
  return op;
}

k::Rotary on_stream(k::Rotary op) {
  translate(op.x, op.cos, op.sin, op.y);
  return op;
}

k::Norm on_stream(k::Norm op) {
  translate(op.x, op.weight, op.bias, op.y, op.mean, op.rstd);
  return op;
}

k::NormBackward on_stream(k::NormBackward op) {
  translate(op.dy, op.x, op.mean, op.rstd, op.weight, op.dx);
  return op;
}

k::ScaledMaskedSoftmax on_stream(k::ScaledMaskedSoftmax op) {
  translate(op.scores, op.mask, op.slopes, op.probs, op.y);
  return op;
}

k::ScaledMaskedSoftmaxBackward on_stream(k::ScaledMaskedSoftmaxBackward op) {
  translate(op.dy, op.probs, op.dscores);
  return op;
}

k::CrossEntropy on_stream(k::CrossEntropy op) {
  translate(op.logits, op.targets, op.max, op.exp_sum, op.target_logit, op.sum);
  return op;
}

k::CrossEntropyBackward on_stream(k::CrossEntropyBackward op) {
  translate(op.dloss, op.logits, op.targets, op.max, op.exp_sum, op.dlogits);
  return op;
}

k::UpdateScalars on_stream(k::UpdateScalars scalars) {
  translate(scalars.lr, scalars.divisor, scalars.found_inf);
  return scalars;
}

// ------------------------------------------------------------ fused operators

int64_t size_of(k::Dtype compute) {
  return compute == k::Dtype::kDouble ? sizeof(double) : sizeof(float);
}

// Sums over rows have the parts of csrc/nn/tensors.cpp.
int64_t num_parts(int64_t num_rows, int64_t num_columns) {
  return std::max<int64_t>(
      1, std::min<int64_t>({16, num_rows, num_rows * num_columns / 65536}));
}

// Calls run(begin, end, part) for each part of the rows.
template <typename Run>
void for_parts(int64_t num_rows, int64_t parts, Run&& run) {
  for (int64_t i = 0; i < parts; ++i) {
    run(num_rows * i / parts, num_rows * (i + 1) / parts, i);
  }
}

// Zeroes the sums of columns, and calls run(begin, end, sums of the part).
template <typename Run>
void with_column_sums(int64_t num_rows, int64_t num_columns, k::Dtype dtype,
                      void* sums, Run&& run) {
  const int64_t parts = num_parts(num_rows, num_columns);
  const int64_t part_bytes = num_columns * size_of(dtype);
  auto* bytes = static_cast<char*>(sums);
  if (bytes != nullptr) std::memset(bytes, 0, parts * part_bytes);
  for_parts(num_rows, parts, [&](int64_t begin, int64_t end, int64_t part) {
    run(begin, end, bytes == nullptr ? nullptr : bytes + part * part_bytes);
  });
}

const char* bias_gelu_forward(const k::BiasGelu& op, void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().bias_gelu_forward(op, 0, op.num_rows);
  });
}

const char* bias_gelu_backward(const k::BiasGelu& op, void* sums,
                               void* stream) {
  translate(sums);
  return ask(stream, [op = on_stream(op), sums] {
    with_column_sums(op.num_rows, op.num_columns, op.dtype, sums,
                     [&](int64_t begin, int64_t end, void* part) {
                       k::fused().bias_gelu_backward(op, begin, end, part);
                     });
  });
}

const char* bias_dropout_residual_forward(const k::BiasDropoutResidual& op,
                                          void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().bias_dropout_residual_forward(op, 0, op.num_rows);
  });
}

const char* bias_dropout_residual_backward(
    const k::BiasDropoutResidualBackward& op, void* sums, void* stream) {
  translate(sums);
  return ask(stream, [op = on_stream(op), sums] {
    with_column_sums(op.num_rows, op.num_columns, op.dtype, sums,
                     [&](int64_t begin, int64_t end, void* part) {
                       k::fused().bias_dropout_residual_backward(op, begin, end,
                                                                 part);
                     });
  });
}

const char* rotary(const k::Rotary& op, void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().rotary(op, 0, op.batch_size * op.length);
  });
}

const char* norm_forward(const k::Norm& op, void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().norm_forward(op, 0, op.num_rows);
  });
}

int64_t norm_partial_rows(const k::NormBackward& op) {
  return num_parts(op.num_rows, op.num_columns);
}

void norm_backward_now(const k::NormBackward& op, void* sums) {
  const int64_t parts = norm_partial_rows(op);
  const int64_t row_bytes = op.num_columns * size_of(op.dtype);
  auto* bytes = static_cast<char*>(sums);
  if (bytes != nullptr) std::memset(bytes, 0, 2 * parts * row_bytes);
  if (bytes == nullptr) {
    k::fused().norm_backward(op, 0, op.num_rows, nullptr, nullptr);
    return;
  }
  for_parts(op.num_rows, parts, [&](int64_t begin, int64_t end, int64_t part) {
    char* dweight = bytes + part * row_bytes;
    k::fused().norm_backward(op, begin, end, dweight,
                             dweight + parts * row_bytes);
  });
}

const char* norm_backward(const k::NormBackward& op, void* sums, void* stream) {
  translate(sums);
  return ask(stream,
             [op = on_stream(op), sums] { norm_backward_now(op, sums); });
}

const char* softmax_forward(const k::ScaledMaskedSoftmax& op, void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().softmax_forward(op, 0,
                               op.batch_size * op.num_heads * op.num_queries);
  });
}

const char* softmax_backward(const k::ScaledMaskedSoftmaxBackward& op,
                             void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().softmax_backward(op, 0, op.num_rows);
  });
}

const char* cross_entropy_forward(const k::CrossEntropy& op, void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().cross_entropy_forward(op, 0, op.num_rows);
  });
}

const char* cross_entropy_backward(const k::CrossEntropyBackward& op,
                                   void* stream) {
  return ask(stream, [op = on_stream(op)] {
    k::fused().cross_entropy_backward(op, 0, op.num_rows);
  });
}

// --------------------------------------------------------------- lists of
// arrays

std::vector<k::Array> list_of(const k::Array* arrays, int64_t num_arrays) {
  std::vector<k::Array> list(arrays, arrays + num_arrays);
  for (k::Array& array : list) translate(array.data);
  return list;
}

int64_t num_partials(const k::Array* arrays, int64_t num_arrays) {
  return static_cast<int64_t>(
      optim::chunks_of(list_of(arrays, num_arrays)).size());
}

// Reduces each array to one number: `combine` over its chunks, in order.
template <typename Combine>
const char* reduce(const k::Array* arrays, int64_t num_arrays,
                   double (*kernel)(const k::Array&, int64_t, int64_t),
                   double* partials, double* results, void* stream,
                   Combine combine) {
  translate(partials, results);
  return ask(stream, [list = list_of(arrays, num_arrays), kernel, partials,
                      results, combine] {
    const std::vector<Chunk> chunks = optim::chunks_of(list);
    std::fill(results, results + list.size(), 0.0);
    for (size_t i = 0; i < chunks.size(); ++i) {
      const Chunk& chunk = chunks[i];
      partials[i] = kernel(list[chunk.array_idx], chunk.begin, chunk.end);
      double& result = results[chunk.array_idx];
      result = combine(result, partials[i]);
    }
  });
}

const char* sums_of_squares(const k::Array* arrays, int64_t num_arrays,
                            double* partials, double* results, void* stream) {
  return reduce(arrays, num_arrays, k::fused().sum_of_squares, partials,
                results, stream, [](double a, double b) { return a + b; });
}

const char* max_abs(const k::Array* arrays, int64_t num_arrays,
                    double* partials, double* results, void* stream) {
  return reduce(arrays, num_arrays, k::fused().max_abs, partials, results,
                stream,
                [](double a, double b) { return a > b || a != a ? a : b; });
}

const char* scale(const k::Array* arrays, int64_t num_arrays,
                  const double* factor, void* stream) {
  translate(factor);
  return ask(stream, [list = list_of(arrays, num_arrays), factor] {
    if (*factor == 1) return;
    for (const k::Array& array : list) {
      k::fused().scale(array, *factor, 0, array.num_elements);
    }
  });
}

// --------------------------------------------------------------------
// optimizers

using Updates = std::vector<k::UpdateArrays>;

Updates list_of(const k::UpdateArrays* arrays, int64_t num_arrays) {
  Updates list(arrays, arrays + num_arrays);
  for (k::UpdateArrays& own : list) {
    translate(own.param, own.grad, own.exp_avg, own.exp_avg_sq, own.copy,
              own.step);
  }
  return list;
}

bool is_skipped(const k::UpdateScalars& scalars) {
  return scalars.found_inf != nullptr && *scalars.found_inf != 0;
}

double divisor_of(const k::UpdateScalars& scalars) {
  return scalars.divisor == nullptr ? 1 : *scalars.divisor;
}

void count_steps(const Updates& list) {
  for (const k::UpdateArrays& arrays : list) *arrays.step += 1;
}

// Calls run(arrays, index, begin, end) for each chunk.
template <typename Run>
void for_chunks(const Updates& list, Run&& run) {
  for (const Chunk& chunk : optim::chunks_of(list)) {
    run(list[chunk.array_idx], chunk.array_idx, chunk.begin, chunk.end);
  }
}

const char* adam(const k::UpdateArrays* arrays, int64_t num_arrays,
                 const k::AdamOptions& options, const k::UpdateScalars& scalars,
                 void* stream) {
  return ask(stream, [list = list_of(arrays, num_arrays), options,
                      scalars = on_stream(scalars)] {
    if (is_skipped(scalars)) return;
    count_steps(list);
    for_chunks(list, [&](const k::UpdateArrays& own, int64_t, int64_t begin,
                         int64_t end) {
      k::fused().adam(own,
                      k::adam_factors(options, *own.step, divisor_of(scalars)),
                      *scalars.lr, begin, end);
    });
  });
}

const char* adam_compact(const k::CompactArrays* arrays, int64_t num_arrays,
                         const k::AdamOptions& options,
                         const k::UpdateScalars& scalars, void* stream) {
  std::vector<k::CompactArrays> list(arrays, arrays + num_arrays);
  for (k::CompactArrays& own : list) {
    own.arrays = list_of(&own.arrays, 1)[0];
    translate(own.exp_avg_scales, own.exp_avg_sq_scales, own.residue);
  }
  return ask(stream, [list, options, scalars = on_stream(scalars)] {
    if (is_skipped(scalars)) return;
    for (const k::CompactArrays& own : list) {
      *own.arrays.step += 1;
      k::fused().adam_compact(
          own, k::adam_factors(options, *own.arrays.step, divisor_of(scalars)),
          *scalars.lr, 0, own.arrays.num_elements);
    }
  });
}

int64_t num_lamb_partial_sums(const k::UpdateArrays* arrays,
                              int64_t num_arrays) {
  const auto chunks = optim::chunks_of(list_of(arrays, num_arrays));
  return 2 * static_cast<int64_t>(chunks.size());
}

const char* lamb_moments(const k::UpdateArrays* arrays, int64_t num_arrays,
                         const k::AdamOptions& options,
                         const k::UpdateScalars& scalars, double* partial_sums,
                         double* sums, void* stream) {
  translate(partial_sums, sums);
  return ask(stream, [list = list_of(arrays, num_arrays), options,
                      scalars = on_stream(scalars), part = partial_sums,
                      sums]() mutable {
    const auto num = static_cast<int64_t>(list.size());
    std::fill(sums, sums + 2 * num, 0.0);
    if (is_skipped(scalars)) return;
    count_steps(list);
    for_chunks(list, [&](const k::UpdateArrays& own, int64_t idx, int64_t begin,
                         int64_t end) {
      k::fused().lamb_moments(
          own, k::adam_factors(options, *own.step, divisor_of(scalars)), begin,
          end, part);
      sums[idx] += part[0];
      sums[num + idx] += part[1];
      part += 2;
    });
  });
}

const char* lamb_apply(const k::UpdateArrays* arrays, int64_t num_arrays,
                       const k::LambOptions& options,
                       const k::UpdateScalars& scalars, const double* sums,
                       void* stream) {
  translate(sums);
  return ask(stream, [list = list_of(arrays, num_arrays), options,
                      scalars = on_stream(scalars), sums] {
    if (is_skipped(scalars)) return;
    const auto num = static_cast<int64_t>(list.size());
    for_chunks(list, [&](const k::UpdateArrays& own, int64_t idx, int64_t begin,
                         int64_t end) {
      const double ratio = k::trust_ratio(options, sums[idx], sums[num + idx]);
      k::fused().lamb_apply(own, k::adam_factors(options.adam, *own.step, 1),
                            *scalars.lr * ratio, begin, end);
    });
  });
}

template <typename T>
k::MomentumFactors move_norm(const k::UpdateArrays& own,
                             const k::NovoGradOptions& options,
                             const k::UpdateScalars& scalars, double norm) {
  T* running = static_cast<T*>(own.exp_avg_sq);
  const double divisor = divisor_of(scalars);
  *running = static_cast<T>(
      k::running_norm(options, *own.step, *running, norm, divisor));
  return k::novograd_factors(options, *own.step, *running, *scalars.lr,
                             divisor);
}

const char* novograd(const k::UpdateArrays* arrays, int64_t num_arrays,
                     const k::NovoGradOptions& options,
                     const k::UpdateScalars& scalars, const double* norms,
                     void* stream) {
  translate(norms);
  return ask(stream, [list = list_of(arrays, num_arrays), options,
                      scalars = on_stream(scalars), norms] {
    if (is_skipped(scalars)) return;
    count_steps(list);
    std::vector<k::MomentumFactors> factors;
    for (size_t i = 0; i < list.size(); ++i) {
      factors.push_back(
          list[i].dtype == k::Dtype::kDouble
              ? move_norm<double>(list[i], options, scalars, norms[i])
              : move_norm<float>(list[i], options, scalars, norms[i]));
    }
    for_chunks(list, [&](const k::UpdateArrays& own, int64_t idx, int64_t begin,
                         int64_t end) {
      k::fused().momentum(own, factors[idx], begin, end);
    });
  });
}

const char* move_loss_scale(const k::LossScaleRule& rule,
                            const double* found_inf, k::LossScaleState* state,
                            void* stream) {
  translate(found_inf, state);
  return ask(stream, [rule, found_inf, state] {
    k::move_loss_scale(rule, *found_inf != 0, state);
  });
}

const k::Launchers kLaunchers = {num_parts,
                                 bias_gelu_forward,
                                 bias_gelu_backward,
                                 bias_dropout_residual_forward,
                                 bias_dropout_residual_backward,
                                 rotary,
                                 norm_forward,
                                 norm_partial_rows,
                                 norm_backward,
                                 softmax_forward,
                                 softmax_backward,
                                 cross_entropy_forward,
                                 cross_entropy_backward,
                                 num_partials,
                                 sums_of_squares,
                                 max_abs,
                                 scale,
                                 adam,
                                 adam_compact,
                                 num_lamb_partial_sums,
                                 lamb_moments,
                                 lamb_apply,
                                 novograd,
                                 move_loss_scale};

// The kernels of smp for the key of CUDA choose the device by their tensors.
void as_for_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CUDA), stack);
}

}  // namespace

void install(const Device& device) {
  the_device = device;
  k::set_launchers(static_cast<int>(kType), &kLaunchers);
  static torch::Library library(torch::Library::IMPL, "smp",
                                c10::DispatchKey::PrivateUse1, __FILE__,
                                __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() != std::optional<std::string_view>("smp")) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    library.impl(name.name.c_str() + sizeof("smp::") - 1,
                 torch::CppFunction::makeFromBoxedFunction<&as_for_cuda>());
  }
}

}  // namespace smp::late_kernels
