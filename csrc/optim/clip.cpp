#include "csrc/optim/clip.h"

#include "csrc/common/check.h"

namespace smp::optim {

double clip_coefficient(double total_norm, double max_norm) {
  SMP_CHECK_VALUE(max_norm >= 0, "clip: max_norm must be >= 0, got ", max_norm);
  const double coefficient = max_norm / (total_norm + 1e-6);
  return coefficient > 1 ? 1 : coefficient;
}

}  // namespace smp::optim
