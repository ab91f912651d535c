// HOT compiles a loop twice: for AVX2, and for the compiler's default target.
#pragma once

// The machine chooses when the module is loaded, so that an older one never meets an unknown instruction. On aarch64, and with
// other compilers, loops use the vector unit of the default target. A sanitizer cannot run code as early as the choice is made.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#define HOT __attribute__((target_clones("avx2", "default")))
#else
#define HOT
#endif
