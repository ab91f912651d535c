// Which entries of a residual have waited.
#pragma once

#include "math.h"

namespace gradcomp {

// An entry has waited unless it was sent in the step before. sent_in is the step in which it was last sent, modulo 256.
SHARED_MATH bool has_waited(uint8_t sent_in, uint8_t step) { return sent_in != static_cast<uint8_t>(step - 1); }

// Notes that entries are sent. The velocity, if given, becomes 0 for one that had waited.
struct Mask {
  float* velocity;
  uint8_t* sent_in;
  uint8_t step;

  SHARED_MATH void note(int64_t entry) const {
    if (sent_in == nullptr) return;
    if (velocity != nullptr && has_waited(sent_in[entry], step)) velocity[entry] = 0.0f;
    sent_in[entry] = step;
  }
};

}  // namespace gradcomp
