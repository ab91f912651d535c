// The arithmetic of an exchange of updates: what a step did to the weights, what of it is offered, and what a cast leaves out.
#pragma once

#include "math.h"

namespace gradcomp {

// Ages of an entry, in steps since it was last sent. The last one stands for all that are older.
constexpr int kAges = 256;

SHARED_MATH uint8_t next_age(uint8_t age) { return static_cast<uint8_t>(age + (age < kAges - 1 ? 1 : 0)); }

// How a step's progress joins what was left before, and what of it is offered.
//   factor     of the progress, but for the part of it that is weight decay's; in a form without branches, for vectors
//   of_residual  the old residual's factor
struct Progress {
  float factor, of_residual;

  // The progress of an entry that went from start by `whole`, which is finite: the factor refuses nothing.
  SHARED_MATH float made(float whole, float decayed) const { return within_largest(factor * (whole - decayed) + decayed); }
  SHARED_MATH float all(float residual, float made) const { return next_residual(residual, made, of_residual); }
};

// What is offered of an entry, by the shares for its age, and what stays.
SHARED_MATH float offered_of(float all, float made, float share_of_all, float share_of_made) {
  return within_largest(share_of_all * all + share_of_made * made);
}
SHARED_MATH float kept_of(float all, float offered) { return within_largest(all - offered); }

// A weight after an update, and what of the update is left if a cast makes it `is`.
SHARED_MATH float updated(float weight, float update, float scale) { return weight - scale * update; }
SHARED_MATH float left_of_update(float update, float was, float is, float scale) { return update - (was - is) / scale; }

}  // namespace gradcomp
