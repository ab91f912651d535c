// Calls the binding's handling of devices on devices that are not there, and prints the first expectation that does not hold.

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "bind_device.h"

#define HOLDS(condition)                                      \
  do {                                                        \
    if (!(condition)) {                                       \
      std::printf("line %d: not %s\n", __LINE__, #condition); \
      std::exit(1);                                           \
    }                                                         \
  } while (false)

using gradcomp::CurrentDevice;
using gradcomp::DevicesSeen;

namespace {

int current() { return fake::current == nullptr ? -1 : fake::current->device; }

void the_device_before_is_current_again() {
  cudaSetDevice(1);
  {
    const CurrentDevice other(2);
    HOLDS(current() == 2);
  }
  HOLDS(current() == 1);
  {
    const CurrentDevice same(1);
    HOLDS(current() == 1);
  }
  HOLDS(current() == 1);
}

void a_call_that_fails_restores_it_too() {
  cudaSetDevice(1);
  try {
    const CurrentDevice other(3);
    throw std::runtime_error("a launch failed");
  } catch (const std::runtime_error&) {
  }
  HOLDS(current() == 1);
}

void a_thread_without_a_context_has_none_again() {
  std::thread([] {
    HOLDS(current() == -1);
    {
      const CurrentDevice other(3);
      HOLDS(current() == 3);
    }
    HOLDS(current() == -1);
  }).join();
  HOLDS(!fake::contexts[0].made);  // nothing ran on it
}

void a_device_that_is_not_there_is_named() {
  cudaSetDevice(1);
  std::string said;
  try {
    const CurrentDevice none(7);
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  HOLDS(said.find("invalid device ordinal") != std::string::npos);
  HOLDS(current() == 1);
}

void a_first_call_in_a_capture_is_refused() {
  DevicesSeen seen;
  std::string said;
  fake::capturing = true;
  try {
    seen.see("take_topk", 1, nullptr);
  } catch (const std::invalid_argument& error) {
    said = error.what();
  }
  HOLDS(said.find("take_topk: its first call on cuda:1") == 0);
  fake::capturing = false;
  seen.see("take_topk", 1, nullptr);
  fake::capturing = true;
  const int before = fake::asked;
  seen.see("take_topk", 1, nullptr);  // it has run there
  HOLDS(fake::asked == before);       // and no call asks again
  said.clear();
  try {
    seen.see("take_topk", 2, nullptr);
  } catch (const std::invalid_argument& error) {
    said = error.what();
  }
  HOLDS(said.find("cuda:2") != std::string::npos);
}

}  // namespace

int main() {
  the_device_before_is_current_again();
  a_call_that_fails_restores_it_too();
  a_thread_without_a_context_has_none_again();
  a_device_that_is_not_there_is_named();
  a_first_call_in_a_capture_is_refused();
  std::puts("all hold");
}
