#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "csrc/pipeline/remote_ref.h"

namespace smp::pipeline {

/// A result that is a view of an argument. The caller makes the view of its own
/// argument, so that writing to one shows in the other as it should.
struct ViewOfArgument {
  int result_idx = 0;
  int argument_idx = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;  ///< from the first element of the argument
};

/// A module's result without the data.
struct ResultMeta {
  std::vector<TensorMeta> tensors;
  /// Indices of the arguments that the module changed in place; their new
  /// values are the last of `tensors`, in this order.
  std::vector<int> changed_args;
  std::string structure;  ///< pickled results without tensors
  /// True if the structure holds values (numbers, strings) that may change from
  /// call to call: the caller must wait for it each time.
  bool has_values = false;

  std::vector<ViewOfArgument> views;  ///< their data do not travel
  /// True if results share memory with arguments in other ways than as views,
  /// or with each other.
  bool shares_memory = false;

  std::string encode() const;
  static ResultMeta decode(const std::string& bytes);
  /// Returns a hash of the result, equal on all ranks; never 0.
  int64_t digest() const;
};

/// Predicts the result of a call, which depends on the module, the arguments'
/// structure, shapes and dtypes, and modes only. Belongs to the thread that
/// holds the baton.
class ResultCache {
 public:
  struct Forward {
    ResultMeta result;
    int64_t digest = 0;
    /// Routes by the number of earlier calls with this key in a context: a
    /// module called twice sends its results to different places.
    std::map<int64_t, std::shared_ptr<Route>> routes;
    /// Arguments that get gradients, by the results that get them ("1" or "0"
    /// each).
    std::unordered_map<std::string, std::string> grads;
    std::map<std::pair<std::string, int64_t>, std::shared_ptr<Route>>
        grad_routes;
  };

  /// Returns the entry of a call, or null when it was not seen before.
  std::shared_ptr<Forward> find(const std::string& key) const;
  std::shared_ptr<Forward> put(const std::string& key, ResultMeta result);
  size_t size() const { return entries_.size(); }

 private:
  // Shapes that change with every batch must not fill the memory.
  static constexpr size_t kMaxEntries = 8192;

  std::unordered_map<std::string, std::shared_ptr<Forward>> entries_;
};

/// Returns the route of a visit, and makes it if it is missing.
/// @param routes  routes of one call
template <typename Map, typename Key>
std::shared_ptr<Route> route_of(Map& routes, const Key& visit) {
  auto& route = routes[visit];
  if (!route) route = std::make_shared<Route>();
  return route;
}

}  // namespace smp::pipeline
