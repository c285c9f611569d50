#include "csrc/pipeline/result_cache.h"

#include <cstring>

#include "csrc/common/check.h"

namespace smp::pipeline {
namespace {

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename T>
  T next() {
    SMP_CHECK(offset_ + sizeof(T) <= bytes_.size(),
              "a description of results ends early");
    T value;
    std::memcpy(&value, bytes_.data() + offset_, sizeof(T));
    offset_ += sizeof(T);
    return value;
  }
  /// Reads the number of items that take at least `bytes_each`.
  template <typename T>
  size_t next_count(size_t bytes_each) {
    const size_t count = next<T>();
    SMP_CHECK(count * bytes_each <= bytes_.size() - offset_,
              "a description of results ends early");
    return count;
  }
  std::string rest() const { return bytes_.substr(offset_); }

 private:
  const std::string& bytes_;
  size_t offset_ = 0;
};

template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

TensorMeta next_tensor(Reader& reader) {
  TensorMeta tensor;
  const auto dtype = reader.next<int8_t>();
  SMP_CHECK(dtype >= 0 && dtype < static_cast<int>(at::ScalarType::Undefined),
            "a description of results has the unknown dtype ", int{dtype});
  tensor.dtype = static_cast<at::ScalarType>(dtype);
  tensor.requires_grad = reader.next<char>() != 0;
  tensor.sizes.resize(reader.next_count<uint8_t>(sizeof(int64_t)));
  auto num_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (int64_t& size : tensor.sizes) {
    size = reader.next<int64_t>();
    SMP_CHECK(size >= 0 && !__builtin_mul_overflow(num_bytes, size, &num_bytes),
              "a description of results has a tensor of impossible size");
  }
  return tensor;
}

}  // namespace

std::string ResultMeta::encode() const {
  std::string bytes;
  bytes.push_back(static_cast<char>(has_values + 2 * shares_memory));
  append(bytes, static_cast<uint32_t>(tensors.size()));
  bytes.push_back(static_cast<char>(changed_args.size()));
  for (const int idx : changed_args) bytes.push_back(static_cast<char>(idx));
  append(bytes, static_cast<uint32_t>(views.size()));
  for (const ViewOfArgument& view : views) {
    append(bytes, view.result_idx);
    append(bytes, view.argument_idx);
    append(bytes, view.offset);
    append(bytes, static_cast<uint8_t>(view.strides.size()));
    for (const int64_t size : view.sizes) append(bytes, size);
    for (const int64_t stride : view.strides) append(bytes, stride);
  }
  for (const TensorMeta& tensor : tensors) tensor.append_to(bytes);
  return bytes + structure;
}

ResultMeta ResultMeta::decode(const std::string& bytes) {
  Reader reader(bytes);
  ResultMeta result;
  const char flags = reader.next<char>();
  result.has_values = (flags & 1) != 0;
  result.shares_memory = (flags & 2) != 0;
  result.tensors.resize(reader.next_count<uint32_t>(3));
  result.changed_args.resize(reader.next_count<uint8_t>(1));
  SMP_CHECK(result.changed_args.size() <= result.tensors.size(),
            "a description of results lacks arguments that were changed");
  for (int& idx : result.changed_args) idx = reader.next<uint8_t>();
  result.views.resize(reader.next_count<uint32_t>(17));
  for (ViewOfArgument& view : result.views) {
    view.result_idx = reader.next<int>();
    view.argument_idx = reader.next<int>();
    view.offset = reader.next<int64_t>();
    view.sizes.resize(reader.next_count<uint8_t>(16));
    view.strides.resize(view.sizes.size());
    for (int64_t& size : view.sizes) size = reader.next<int64_t>();
    for (int64_t& stride : view.strides) stride = reader.next<int64_t>();
    SMP_CHECK(view.result_idx >= 0 && view.argument_idx >= 0 &&
                  static_cast<size_t>(view.result_idx) < result.tensors.size(),
              "a description of results has a view of nothing");
  }
  for (TensorMeta& tensor : result.tensors) tensor = next_tensor(reader);
  result.structure = reader.rest();
  return result;
}

int64_t ResultMeta::digest() const {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (const char c : encode()) {
    hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211ull;
  }
  return static_cast<int64_t>(hash | 1);
}

std::shared_ptr<ResultCache::Forward> ResultCache::find(
    const std::string& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : found->second;
}

std::shared_ptr<ResultCache::Forward> ResultCache::put(const std::string& key,
                                                       ResultMeta result) {
  auto entry = std::make_shared<Forward>();
  entry->digest = result.digest();
  const bool is_certain = !result.has_values;
  entry->result = std::move(result);
  if (entries_.size() >= kMaxEntries) entries_.clear();
  if (is_certain) entries_[key] = entry;
  return entry;
}

}  // namespace smp::pipeline
