#include "csrc/comm/agreement.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string_view>

#include "csrc/common/check.h"

namespace smp::comm {

namespace {

at::Tensor to_tensor(const std::vector<int64_t>& values) {
  at::Tensor tensor =
      at::empty({static_cast<int64_t>(values.size())}, at::kLong);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

std::vector<int64_t> to_vector(const at::Tensor& tensor) {
  const auto* data = tensor.const_data_ptr<int64_t>();
  return {data, data + tensor.numel()};
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + '\n';
  return text;
}

// Returns the FNV-1a hash, the same on every machine, unlike std::hash.
int64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : text) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  }
  return static_cast<int64_t>(hash);
}

// Returns "line 4: X, but Y on group rank 2" for texts that differ.
std::string first_difference(const std::vector<std::string>& texts) {
  auto differs = std::find_if(texts.begin(), texts.end(),
                              [&](const auto& t) { return t != texts[0]; });
  std::istringstream ours(texts[0]);
  std::istringstream theirs(*differs);
  for (std::string a, b;;) {
    if (!std::getline(ours, a)) a = "nothing";
    if (!std::getline(theirs, b)) b = "nothing";
    if (a == b) continue;
    return detail::concat("group rank 0 has ", a, "; group rank ",
                          differs - texts.begin(), " has ", b);
  }
}

}  // namespace

std::vector<int64_t> agree_on_maxima(Communicator& group,
                                     const std::vector<int64_t>& values,
                                     const WaitOptions& wait,
                                     const std::string& what) {
  SMP_ASSERT(!group.is_stream_ordered(), what, " over ", group.name(),
             ", whose collectives run on a device");
  const at::Tensor tensor = to_tensor(values);
  wait_for(*group.all_reduce(tensor, comm::ReduceOp::kMax), wait, group, what);
  return to_vector(tensor);
}

std::vector<std::string> gather_bytes(Communicator& group,
                                      const std::string& bytes,
                                      const WaitOptions& wait,
                                      const std::string& what) {
  const auto size = static_cast<int64_t>(bytes.size());
  const int64_t part_bytes = static_cast<int64_t>(sizeof(size)) +
                             agree_on_maxima(group, {size}, wait, what)[0];
  const at::Tensor mine = at::zeros({part_bytes}, at::kByte);
  auto* const begin = static_cast<char*>(mine.mutable_data_ptr());
  std::memcpy(begin, &size, sizeof(size));
  std::memcpy(begin + sizeof(size), bytes.data(), bytes.size());
  const at::Tensor all = at::empty({group.size() * part_bytes}, at::kByte);
  wait_for(*group.all_gather(all, mine), wait, group, what);
  const auto* part = static_cast<const char*>(all.const_data_ptr());
  std::vector<std::string> result;
  for (int rank = 0; rank < group.size(); ++rank, part += part_bytes) {
    int64_t others_size = 0;
    std::memcpy(&others_size, part, sizeof(others_size));
    result.emplace_back(part + sizeof(others_size),
                        static_cast<size_t>(others_size));
  }
  return result;
}

at::Tensor gather_numbers(Communicator& group, const at::Tensor& numbers,
                          const WaitOptions& wait, const std::string& what) {
  SMP_CHECK_VALUE(numbers.dim() == 1, what, ": expected numbers in one dim, ",
                  "got sizes ", numbers.sizes());
  const at::NoGradGuard no_grad;
  const at::Tensor own = numbers.contiguous();
  at::Tensor all = at::empty({group.size(), own.numel()},
                             own.options().requires_grad(false));
  follow(*group.all_gather(all, own), wait, group, what);
  return all;
}

void require_equal_lines(Communicator& group,
                         const std::vector<std::string>& lines,
                         const WaitOptions& wait, const std::string& what) {
  const std::string text = join(lines);
  const int64_t hash = hash_of(text);
  // max(~hash) is ~min(hash): equal on all ranks only if the hashes are.
  const std::string words = "comparison of the " + what;
  const auto maxima = agree_on_maxima(group, {hash, ~hash}, wait, words);
  if (maxima[0] == ~maxima[1]) return;
  const auto texts = gather_bytes(group, text, wait, words);
  SMP_CHECK_VALUE(false, "the ranks of ", group.name(), " disagree on the ",
                  what, ": ", first_difference(texts),
                  "; build the same model with the same arguments on every "
                  "rank");
}

}  // namespace smp::comm
