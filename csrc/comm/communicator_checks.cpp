#include "csrc/comm/communicator_checks.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "csrc/common/check.h"

namespace smp::comm {
namespace {

void check_alike(const at::Tensor& one, const at::Tensor& other,
                 const CallName& call) {
  SMP_CHECK(one.scalar_type() == other.scalar_type() &&
                one.device() == other.device(),
            call.text(), ": expected equal dtypes and devices, got ",
            describe_tensor(one), " on ", one.device().str(), " and ",
            describe_tensor(other), " on ", other.device().str());
}

void check_sum(const at::Tensor& tensor, const Counts& counts, const char* what,
               const CallName& call) {
  const bool are_numbers =
      static_cast<int>(counts.size()) == call.group->size &&
      std::none_of(counts.begin(), counts.end(),
                   [](int64_t count) { return count < 0; });
  SMP_CHECK(are_numbers && std::accumulate(counts.begin(), counts.end(),
                                           int64_t{0}) == tensor.numel(),
            call.text(), ": expected ", call.group->size, " counts of the ",
            what, " with the sum ", tensor.numel(), ", got ",
            at::IntArrayRef(counts));
}

}  // namespace

std::string CallName::text() const {
  std::ostringstream out;
  out << operation;
  if (peer_word != nullptr) {
    out << '(' << peer_word << '=' << peer;
    if (tag >= 0) out << ", tag=" << tag;
    out << ')';
  }
  out << " on " << group->name << " (group rank " << group->group_rank << " of "
      << group->size << ')';
  return out.str();
}

std::string describe_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  std::ostringstream out;
  out << c10::toString(tensor.scalar_type()) << tensor.sizes();
  return out.str();
}

void check_tensor(const at::Tensor& tensor, const CallName& call) {
  SMP_CHECK(tensor.defined(), call.text(), ": the tensor is undefined");
  SMP_CHECK(tensor.layout() == at::kStrided && tensor.is_contiguous(),
            call.text(), ": expected a dense contiguous tensor, got ",
            describe_tensor(tensor),
            " with other strides or layout; pass tensor.contiguous()");
}

void check_cpu_tensor(const at::Tensor& tensor, const CallName& call) {
  check_tensor(tensor, call);
  SMP_CHECK(tensor.is_cpu(), call.text(),
            ": expected a CPU tensor, got one on ", tensor.device().str(),
            "; copy it with tensor.cpu() or use a "
            "group of the nccl backend");
}

void check_reducible(const at::Tensor& tensor, const CallName& call) {
  check_tensor(tensor, call);
  SMP_CHECK(tensor.scalar_type() != at::kBool && !tensor.is_complex(),
            call.text(), ": expected real numbers, got ",
            describe_tensor(tensor), "; convert it first");
}

void check_peer(const CallName& call) {
  check_root(call);
  SMP_CHECK(call.peer != call.group->group_rank, call.text(),
            ": a rank cannot exchange messages with itself");
  SMP_CHECK(call.tag >= 0, call.text(),
            ": expected a tag that is not negative, got ", call.tag);
}

void check_root(const CallName& call) {
  SMP_CHECK(call.peer >= 0 && call.peer < call.group->size, call.text(),
            ": expected ", call.peer_word, " in [0, ", call.group->size,
            "), got ", call.peer);
}

void check_parts(const at::Tensor& whole, const at::Tensor& part,
                 const CallName& call) {
  check_tensor(whole, call);
  check_tensor(part, call);
  const int size = call.group->size;
  SMP_CHECK(whole.numel() == part.numel() * size, call.text(), ": expected ",
            size, " times the elements of ", describe_tensor(part), ", got ",
            describe_tensor(whole));
  check_alike(whole, part, call);
}

void check_exchange(const at::Tensor& output, const at::Tensor& input,
                    const CallName& call) {
  check_tensor(output, call);
  check_tensor(input, call);
  const int size = call.group->size;
  SMP_CHECK(output.numel() == input.numel() && input.numel() % size == 0,
            call.text(), ": expected equal numbers of elements, a multiple of ",
            size, ", got ", describe_tensor(output), " and ",
            describe_tensor(input));
  check_alike(output, input, call);
}

void check_counts(const at::Tensor& output, const at::Tensor& input,
                  const Counts& output_counts, const Counts& input_counts,
                  const CallName& call) {
  check_tensor(output, call);
  check_tensor(input, call);
  check_sum(output, output_counts, "output", call);
  check_sum(input, input_counts, "input", call);
  check_alike(output, input, call);
}

std::string count_disagreement(const std::vector<Counts>& sent,
                               const std::vector<Counts>& received) {
  for (size_t from = 0; from < sent.size(); ++from) {
    for (size_t to = 0; to < sent.size(); ++to) {
      if (sent[from][to] == received[to][from]) continue;
      return detail::concat("group rank ", from, " sends ", sent[from][to],
                            " elements to group rank ", to, ", which expects ",
                            received[to][from]);
    }
  }
  return {};
}

}  // namespace smp::comm
