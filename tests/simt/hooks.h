// What the compiler calls before every access to memory of a kernel (-fsanitize=thread), and where it finds wrong arithmetic
// (-fsanitize=alignment and others): both without the libraries that usually answer.
#pragma once

#include <cstddef>

namespace simt {

// A thread runs whose own variables lie on this stack, or none does. The calls of host code are ignored.
void enter_kernel(const char* stack);
void leave_kernel();

// A launch's arguments lie in its caller's memory until each thread has copied them.
void ignore_arguments(const void* at, size_t size);

}  // namespace simt
