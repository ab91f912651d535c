// Both twins of every kernel: a drifted signature does not compile, a missing twin does not link.
#pragma once

#include "span.h"

namespace gradcomp {
namespace cpu {
#include "ops.inc"
}
namespace cuda {
#include "ops.inc"
}
}  // namespace gradcomp
