// Chains of kernels on CPUs.

#include "../math_payload.h"
#include "../ops.h"

namespace gradcomp::cpu {

void write_header(OptionalSpan<const int32_t> flag, Span<int32_t> header, Queue) {
  header.data[0] = 0;
  header.data[1] = flag.given() ? flag.data[0] : 0;
}

#include "../chains.inc"

}  // namespace gradcomp::cpu
