#pragma once

#include <string>

namespace smp::tensor_parallel {

/// Names the layer that this thread runs, for the headers of its collectives:
/// ranks that run different layers of one shape would compute on each other's
/// samples. Empty: no layer, as in backward, where forward has been compared.
/// @return the name before
std::string exchange_layer_name(std::string name);
const std::string& layer_name();

}  // namespace smp::tensor_parallel
