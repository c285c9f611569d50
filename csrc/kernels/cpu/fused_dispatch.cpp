#include <cstdlib>
#include <string_view>

#include "csrc/kernels/cpu/fused_table.h"

// The choice of the instruction set of the fused kernels.

namespace smp::kernels::cpu {

const FusedTable* const* usable_tables() {
  struct ChosenTable {
    const FusedTable* tables[5] = {};
    ChosenTable() {
      int count = 0;
#ifdef __x86_64__
      const bool has_avx2 = __builtin_cpu_supports("avx2") &&
                            __builtin_cpu_supports("fma") &&
                            __builtin_cpu_supports("f16c");
      if (has_avx2 && __builtin_cpu_supports("avx512f") &&
          __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512bf16")) {
          tables[count++] = &avx512_bf16_table();
        }
        tables[count++] = &avx512_table();
      }
      if (has_avx2) tables[count++] = &avx2_table();
#endif
      tables[count] = &portable_table();
    }
  };
  static const ChosenTable chosen;
  return chosen.tables;
}

const FusedTable& table_for(std::string_view capability) {
  const FusedTable* const* table = usable_tables();
#ifdef __x86_64__
  const auto is_beyond = [&](const FusedTable* given) {
    const bool has_bf16 = given == &avx512_bf16_table();
    if (capability == "default") return given != &portable_table();
    if (capability == "avx2") return has_bf16 || given == &avx512_table();
    return capability == "avx512" && has_bf16;
  };
  while (is_beyond(*table)) ++table;
#endif
  return **table;
}

namespace {

const FusedTable& best() {
  static const FusedTable& table = []() -> const FusedTable& {
    const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
    return table_for(capability == nullptr ? "" : capability);
  }();
  return table;
}

}  // namespace

void norm_forward(const Norm& norm, int64_t begin, int64_t end) {
  best().norm_forward(norm, begin, end);
}

void norm_backward(const NormBackward& norm, int64_t begin, int64_t end,
                   void* dweight, void* dbias) {
  best().norm_backward(norm, begin, end, dweight, dbias);
}

void bias_gelu_forward(const BiasGelu& gelu, int64_t begin, int64_t end) {
  best().bias_gelu_forward(gelu, begin, end);
}

void bias_gelu_backward(const BiasGelu& gelu, int64_t begin, int64_t end,
                        void* dbias) {
  best().bias_gelu_backward(gelu, begin, end, dbias);
}

void bias_dropout_residual_forward(const BiasDropoutResidual& op, int64_t begin,
                                   int64_t end) {
  best().bias_dropout_residual_forward(op, begin, end);
}

void bias_dropout_residual_backward(const BiasDropoutResidualBackward& op,
                                    int64_t begin, int64_t end, void* dbias) {
  best().bias_dropout_residual_backward(op, begin, end, dbias);
}

void rotary(const Rotary& rotary, int64_t begin, int64_t end) {
  best().rotary(rotary, begin, end);
}

void softmax_forward(const ScaledMaskedSoftmax& op, int64_t begin,
                     int64_t end) {
  best().softmax_forward(op, begin, end);
}

void softmax_backward(const ScaledMaskedSoftmaxBackward& op, int64_t begin,
                      int64_t end) {
  best().softmax_backward(op, begin, end);
}

void cross_entropy_forward(const CrossEntropy& op, int64_t begin, int64_t end) {
  best().cross_entropy_forward(op, begin, end);
}

void cross_entropy_backward(const CrossEntropyBackward& op, int64_t begin,
                            int64_t end) {
  best().cross_entropy_backward(op, begin, end);
}

double sum_of_squares(const Array& array, int64_t begin, int64_t end) {
  return best().sum_of_squares(array, begin, end);
}

double max_abs(const Array& array, int64_t begin, int64_t end) {
  return best().max_abs(array, begin, end);
}

void scale(const Array& array, double factor, int64_t begin, int64_t end) {
  best().scale(array, factor, begin, end);
}

void adam(const UpdateArrays& arrays, const AdamFactors& factors, double lr,
          int64_t begin, int64_t end) {
  best().adam(arrays, factors, lr, begin, end);
}

void lamb_moments(const UpdateArrays& arrays, const AdamFactors& factors,
                  int64_t begin, int64_t end, double* sums) {
  best().lamb_moments(arrays, factors, begin, end, sums);
}

void lamb_apply(const UpdateArrays& arrays, const AdamFactors& factors,
                double rate, int64_t begin, int64_t end) {
  best().lamb_apply(arrays, factors, rate, begin, end);
}

void momentum(const UpdateArrays& arrays, const MomentumFactors& factors,
              int64_t begin, int64_t end) {
  best().momentum(arrays, factors, begin, end);
}

}  // namespace smp::kernels::cpu
