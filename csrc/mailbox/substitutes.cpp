#include "csrc/mailbox/substitutes.h"

namespace smp::mailbox {

Substitutes& substitutes() {
  static Substitutes of_process;
  return of_process;
}

}  // namespace smp::mailbox
