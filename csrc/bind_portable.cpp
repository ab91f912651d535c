// Old names of glibc's functions, for a wheel that is built on a new system and runs on older ones (GRADCOMP_PORTABLE).
//
// glibc 2.34 moved its threads from libpthread to libc and gave them a new symbol version, which older systems lack. A program
// that is linked on a new system asks for the new version, although both name the same code. The linker's --wrap sends the
// calls of libstdc++, which the wheel brings along, to the functions below. These ask for the version that every glibc has.

#include <pthread.h>

#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#else
#error "GRADCOMP_PORTABLE knows x86_64 and aarch64 only: build without it, in a container of the older system"
#endif

#define OLD(name) __asm__(".symver " #name "," #name "@" OLDEST)

extern "C" {
OLD(pthread_create);
OLD(pthread_join);
OLD(pthread_once);

int __wrap_pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*work)(void*), void* argument) {
  return pthread_create(thread, attributes, work, argument);
}
int __wrap_pthread_join(pthread_t thread, void** result) { return pthread_join(thread, result); }
int __wrap_pthread_once(pthread_once_t* control, void (*work)()) { return pthread_once(control, work); }

// libstdc++ on glibc 2.38 or newer reads numbers by a function that also knows the binary digits of C23. Its texts have none.
unsigned long oldest_strtoul(const char* text, char** end, int base) __asm__("strtoul");
unsigned long __wrap___isoc23_strtoul(const char* text, char** end, int base) { return oldest_strtoul(text, end, base); }

// libstdc++ asks this variable of glibc 2.32 whether it may do without atomic operations. It may not.
char __libc_single_threaded = 0;
}
