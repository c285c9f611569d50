#pragma once

#include "csrc/kernels/cpu/fused_table.h"
#include "csrc/kernels/cpu/vector/compact.h"
#include "csrc/kernels/cpu/vector/elementwise.h"
#include "csrc/kernels/cpu/vector/multi_array.h"
#include "csrc/kernels/cpu/vector/norm.h"
#include "csrc/kernels/cpu/vector/rotary.h"
#include "csrc/kernels/cpu/vector/softmax.h"
#include "csrc/kernels/cpu/vector/update.h"

namespace smp::kernels::cpu::SMP_ISA {

constexpr FusedTable kTable = {&norm_forward,
                               &norm_backward,
                               &bias_gelu_forward,
                               &bias_gelu_backward,
                               &bias_dropout_residual_forward,
                               &bias_dropout_residual_backward,
                               &rotary,
                               &softmax_forward,
                               &softmax_backward,
                               &cross_entropy_forward,
                               &cross_entropy_backward,
                               &sum_of_squares,
                               &max_abs,
                               &scale,
                               &adam,
                               &adam_compact,
                               &lamb_moments,
                               &lamb_apply,
                               &momentum};

}  // namespace smp::kernels::cpu::SMP_ISA
