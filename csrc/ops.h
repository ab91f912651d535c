// The prototypes of both twins of every kernel. A twin whose arguments differ does not compile, a missing one does not link.
#pragma once

#include "span.h"

#define KERNEL(name, arguments, ...) void name arguments
#define SCRATCH(name, sizes) int64_t name##_scratch sizes

namespace gradcomp {
namespace cpu {
#include "ops.inc"
}
namespace cuda {
#include "ops.inc"
}
}  // namespace gradcomp

#undef KERNEL
#undef SCRATCH
