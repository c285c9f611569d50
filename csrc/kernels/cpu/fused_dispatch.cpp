#include <cstdlib>
#include <string_view>

#include "csrc/kernels/cpu/fused_table.h"

// The choice of the instruction set of the fused kernels.

namespace smp::kernels::cpu {

const FusedTable* const* usable_tables() {
  struct ChosenTable {
    const FusedTable* tables[5] = {};
    ChosenTable() {
      int count = 0;
#ifdef __x86_64__
      const bool has_avx2 = __builtin_cpu_supports("avx2") &&
                            __builtin_cpu_supports("fma") &&
                            __builtin_cpu_supports("f16c");
      if (has_avx2 && __builtin_cpu_supports("avx512f") &&
          __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") &&
          __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512bf16")) {
          tables[count++] = &avx512_bf16_table();
        }
        tables[count++] = &avx512_table();
      }
      if (has_avx2) tables[count++] = &avx2_table();
#endif
      tables[count] = &portable_table();
    }
  };
  static const ChosenTable chosen;
  return chosen.tables;
}

const FusedTable& table_for(std::string_view capability) {
  const FusedTable* const* table = usable_tables();
#ifdef __x86_64__
  const auto is_beyond = [&](const FusedTable* given) {
    const bool has_bf16 = given == &avx512_bf16_table();
    if (capability == "default") return given != &portable_table();
    if (capability == "avx2") return has_bf16 || given == &avx512_table();
    return capability == "avx512" && has_bf16;
  };
  while (is_beyond(*table)) ++table;
#endif
  return **table;
}

}  // namespace smp::kernels::cpu

namespace smp::kernels {

const cpu::FusedTable& fused() {
  static const cpu::FusedTable& table = []() -> const cpu::FusedTable& {
    const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
    return cpu::table_for(capability == nullptr ? "" : capability);
  }();
  return table;
}

}  // namespace smp::kernels
