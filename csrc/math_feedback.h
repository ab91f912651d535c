// The arithmetic of error feedback: velocities, second moments, and which entries have waited.
#pragma once

#include "math.h"

namespace gradcomp {

// The largest number whose square is a finite float.
constexpr float kLargestRoot = 0x1.fffffep63f;

// A gradient for a second moment: 0 if its square is beyond the floats. torch's moment would become infinite, and its entry
// stand still for ever; a moment held at the largest float would make directions as long as the gradient.
SHARED_MATH float within_root(float g) { return fabsf(g) <= kLargestRoot ? g : 0.0f; }

// A step of error feedback: how a gradient g, a velocity and a second moment make what is added to the residual.
//   velocity <- momentum * velocity + fresh * g
//   second   <- decay * second + fresh_square * g * g
//   ahead    =  of_gradient * g + of_velocity * velocity, over root_scale * sqrt(second) + epsilon if there is a second moment
// With a second moment, g is within_root(g).
// waiting is the numerator's factor of g for an entry that has waited: its residual sums gradients up as a velocity would.
// of_residual is the old residual's factor.
struct Rule {
  float of_residual, momentum, fresh, of_gradient, of_velocity, decay, fresh_square, root_scale, epsilon, waiting;

  SHARED_MATH float next_residual(float residual, float added) const { return within_largest(of_residual * residual + added); }
  SHARED_MATH float next_velocity(float velocity, float g) const { return within_largest(momentum * velocity + fresh * g); }
  SHARED_MATH float next_second(float second, float g) const { return within_largest(decay * second + fresh_square * (g * g)); }
  SHARED_MATH float ahead(float g, float velocity) const { return of_gradient * g + of_velocity * velocity; }
  SHARED_MATH float ahead(float g, float velocity, float second, bool waited) const {
    return (waited ? waiting * g : ahead(g, velocity)) / (root_scale * sqrtf(second) + epsilon);
  }
};

// An entry has waited unless it was sent in the step before, or was empty. sent_in is the step in which it was last sent,
// modulo 256; 0 before the first. An entry that was empty before this step counts as sent in the step before.
SHARED_MATH bool has_waited(uint8_t sent_in, uint8_t step) { return sent_in != static_cast<uint8_t>(step - 1); }
SHARED_MATH uint8_t last_sent(uint8_t sent_in, uint8_t step, float old_residual) {
  return old_residual == 0.0f ? static_cast<uint8_t>(step - 1) : sent_in;
}

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
