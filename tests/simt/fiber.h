// A fiber: a function that runs on its own stack, and can pause in its middle and go on later.
#pragma once

#include <cstddef>

namespace simt {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Run body(argument), or the rest of it, until it pauses or ends. A fiber whose body has ended takes the next one.
  void run(void (*body)(void*), void* argument);

  // Go back to the caller of run(). Only the running body calls this.
  static void pause();

  static constexpr size_t kStack = 128 * 1024;
  const char* stack() const { return stack_; }  // its lowest byte

 private:
  friend void fiber_main();

  void switch_to_fiber();
  void switch_to_caller();

  char* stack_;            // the page below it is protected, so that an overflow is a fault and not a silent overwrite
  void* place_ = nullptr;  // the place where the fiber goes on, which the switch keeps
  void* caller_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool busy_ = false;

  // AddressSanitizer's records of both stacks, and the place of the caller's. Nothing else uses them.
  [[maybe_unused]] void* own_frames_ = nullptr;
  [[maybe_unused]] void* caller_frames_ = nullptr;
  [[maybe_unused]] const void* caller_stack_ = nullptr;
  [[maybe_unused]] size_t caller_stack_size_ = 0;
};

}  // namespace simt
