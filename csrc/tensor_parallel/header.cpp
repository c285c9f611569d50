#include "csrc/tensor_parallel/header.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string_view>

#include "csrc/tensor_parallel/layer_name.h"

namespace smp::tensor_parallel {
namespace {

// Mixes data into a hash, FNV-1a, eight bytes at a time: the same on every
// machine.
uint64_t mix(uint64_t hash, const void* data, size_t num_bytes) {
  const auto* bytes = static_cast<const char*>(data);
  for (size_t i = 0; i + sizeof(uint64_t) <= num_bytes; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, sizeof(word));
    hash = (hash ^ word) * 0x100000001b3ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

constexpr uint64_t kSeed = 0xcbf29ce484222325ULL;

// Sets the layer. Names of layers differ at their ends; the part cut off counts
// as a hash.
void set_layer(Header& header, std::string_view name) {
  const size_t num_kept = std::min(name.size(), header.layer.size() - 1);
  std::copy_n(name.end() - static_cast<std::ptrdiff_t>(num_kept), num_kept,
              header.layer.begin());
  if (num_kept == name.size()) return;
  std::vector<int64_t> bytes(name.begin(), name.end());
  header.add(bytes);
}

static_assert(sizeof(Header) % sizeof(uint64_t) == 0);

}  // namespace

Header Header::of(const char* what) {
  Header header;
  const std::string_view text(what);
  std::copy_n(text.begin(), std::min(text.size(), header.what.size() - 1),
              header.what.begin());
  set_layer(header, layer_name());
  return header;
}

Header Header::of(const char* what, const at::Tensor& x, at::IntArrayRef shape,
                  int64_t dim, int64_t other_dim) {
  Header header = of(what);
  header.dtype = static_cast<int64_t>(x.scalar_type());
  header.num_dims = static_cast<int64_t>(shape.size());
  std::copy_n(shape.begin(), std::min<size_t>(shape.size(), kMaxDims),
              header.shape.begin());
  header.dims = {dim, other_dim};
  if (shape.size() > kMaxDims) {
    header.add(std::vector<int64_t>(shape.begin() + kMaxDims, shape.end()));
  }
  return header;
}

Header& Header::add(const std::vector<int64_t>& sizes) {
  extras = static_cast<int64_t>(mix(kSeed ^ static_cast<uint64_t>(extras),
                                    sizes.data(), 8 * sizes.size()));
  return *this;
}

uint64_t Header::hash() const { return mix(kSeed, this, sizeof(*this)); }

std::string Header::describe() const {
  std::ostringstream out;
  out << what.data();
  if (num_dims >= 0) describe_tensor(out);
  if (layer[0] != '\0') out << " in '" << layer.data() << "'";
  return out.str();
}

void Header::describe_tensor(std::ostream& out) const {
  out << " of " << c10::toString(static_cast<c10::ScalarType>(dtype))
      << at::IntArrayRef(shape.data(), std::min<int64_t>(num_dims, kMaxDims));
  if (dims[0] >= 0) out << " along dim " << dims[0];
  if (dims[1] >= 0) out << " and dim " << dims[1];
}

}  // namespace smp::tensor_parallel
