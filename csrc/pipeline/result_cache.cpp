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
  std::string rest() const { return bytes_.substr(offset_); }

 private:
  const std::string& bytes_;
  size_t offset_ = 0;
};

template <typename T>
void append(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
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
  result.tensors.resize(reader.next<uint32_t>());
  result.changed_args.resize(reader.next<uint8_t>());
  for (int& idx : result.changed_args) idx = reader.next<uint8_t>();
  result.views.resize(reader.next<uint32_t>());
  for (ViewOfArgument& view : result.views) {
    view.result_idx = reader.next<int>();
    view.argument_idx = reader.next<int>();
    view.offset = reader.next<int64_t>();
    view.sizes.resize(reader.next<uint8_t>());
    view.strides.resize(view.sizes.size());
    for (int64_t& size : view.sizes) size = reader.next<int64_t>();
    for (int64_t& stride : view.strides) stride = reader.next<int64_t>();
  }
  for (TensorMeta& tensor : result.tensors) {
    tensor.dtype = static_cast<at::ScalarType>(reader.next<int8_t>());
    tensor.requires_grad = reader.next<char>() != 0;
    tensor.sizes.resize(reader.next<uint8_t>());
    for (int64_t& size : tensor.sizes) size = reader.next<int64_t>();
  }
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
