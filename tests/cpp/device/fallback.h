#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <string>

namespace smp::late {

/// Runs any operator with tensors of the late device by its CPU kernel: later,
/// on the thread of the current stream, wherever shapes of results are known;
/// else at once, after all that the stream has.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Counts a call of an operator.
/// @param way "late", or why the stream was drained
void count_call(const std::string& name, const std::string& way);
/// Returns numbers of calls by operator and way, since the last reset.
std::map<std::string, std::map<std::string, int64_t>> counts();
void reset_counts();

}  // namespace smp::late
