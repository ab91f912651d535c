// A fiber: a function that runs on its own stack, and can be left in its middle and entered again.
#pragma once

#include <cstddef>

namespace simt {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From outside: runs body(argument), or what is left of it, until it pauses or ends. A fiber whose body has ended takes the
  // next one.
  void run(void (*body)(void*), void* argument);

  // From inside the running body: back to where run() was called.
  static void pause();

 private:
  friend void fiber_main();

  void switch_to_fiber();
  void switch_to_caller();

  char* stack_;            // below it lies a page that may not be touched: an overflow is a fault, not a silent overwrite
  void* place_ = nullptr;  // where the fiber goes on; the machine's half of the switch keeps it
  void* caller_ = nullptr;
  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  bool busy_ = false;

  void* own_frames_ = nullptr;  // what AddressSanitizer wants to know of stacks: its record of ours, and where the caller's is
  void* caller_frames_ = nullptr;
  const void* caller_stack_ = nullptr;
  size_t caller_stack_size_ = 0;
};

}  // namespace simt
