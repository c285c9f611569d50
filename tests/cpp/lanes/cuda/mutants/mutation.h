#pragma once

#include <string>

namespace smp::lanes {

/// Returns whether this process has the mutation (mutations.py) of that name.
bool is_mutated(const char* name);
/// Sets the mutation of this process and of those that it forks; empty: none.
void set_mutation(const std::string& name);

}  // namespace smp::lanes
