// HOT compiles a loop several times: for AVX-512, for AVX2, and for the compiler's default target.
#pragma once

// The machine chooses when the module is loaded, so that an older one never meets an unknown instruction. On aarch64, and with
// other compilers, loops use the vector unit of the default target. A sanitizer cannot run code as early as the choice is made.
// GRADCOMP_ONE_TARGET leaves the default target alone: the tests compare targets. Such a function is not inlined either: GCC 12
// takes what `__restrict` says of one call for all, and packed wrong digits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(GRADCOMP_ONE_TARGET)
#define HOT __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HOT __attribute__((noinline))
#endif
