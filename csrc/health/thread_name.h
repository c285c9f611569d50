#pragma once

#include <string>

namespace smp::health {

/// Names the calling thread for debuggers and top; cut to 15 characters.
void name_this_thread(const std::string& name);

}  // namespace smp::health
