// Fibers: their stacks, the switch between two of them, and its announcement to AddressSanitizer.

#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

#ifndef __x86_64__
#define SIMT_UCONTEXT
#endif
#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define TELL_SANITIZER(call) call
#else
#define TELL_SANITIZER(call) \
  do {                       \
  } while (false)
#endif

namespace simt {

void fiber_main();

namespace {

constexpr size_t kGuard = 4096;

Fiber* running = nullptr;

}  // namespace

// x86-64 switches in a dozen instructions, which keep the registers that a called function must preserve and exchange the
// stacks. swapcontext works everywhere, but it asks the system for the signal mask (a microsecond for a round trip), and
// AddressSanitizer forgets a stack's red zones when it sees it.
#ifndef SIMT_UCONTEXT

extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");

// Prepare a stack as simt_switch leaves one: six registers, and on top the place to go to.
static void* first_place(char* stack, size_t size) {
  auto* top = reinterpret_cast<uintptr_t*>(stack + size) - 2;
  top[0] = reinterpret_cast<uintptr_t>(&fiber_main);
  return top - 6;
}

static void switch_stacks(void*& from, void* to) { simt_switch(&from, to); }
static void forget_place(void*) {}

#else

static void* first_place(char* stack, size_t size) {
  auto* context = new ucontext_t;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = size;
  makecontext(context, fiber_main, 0);
  return context;
}

static void switch_stacks(void*& from, void* to) {
  if (from == nullptr) from = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(from), static_cast<ucontext_t*>(to));
}
static void forget_place(void* place) { delete static_cast<ucontext_t*>(place); }

#endif

Fiber::Fiber() {
  void* const memory =
      mmap(nullptr, kGuard + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kGuard, PROT_NONE);
  stack_ = static_cast<char*>(memory) + kGuard;
  place_ = first_place(stack_, kStack);
}

Fiber::~Fiber() {
  // An abandoned body never left its frames.
  TELL_SANITIZER(__asan_unpoison_memory_region(stack_, kStack));
  forget_place(place_);
#ifdef SIMT_UCONTEXT
  forget_place(caller_);
#endif
  munmap(stack_ - kGuard, kGuard + kStack);
}

void Fiber::run(void (*body)(void*), void* argument) {
  if (!busy_) {
    busy_ = true;
    body_ = body;
    argument_ = argument;
  }
  running = this;
  switch_to_fiber();
}

void Fiber::pause() { running->switch_to_caller(); }

void Fiber::switch_to_fiber() {
  TELL_SANITIZER(__sanitizer_start_switch_fiber(&caller_frames_, stack_, kStack));
  switch_stacks(caller_, place_);
  TELL_SANITIZER(__sanitizer_finish_switch_fiber(caller_frames_, nullptr, nullptr));
}

void Fiber::switch_to_caller() {
  TELL_SANITIZER(__sanitizer_start_switch_fiber(&own_frames_, caller_stack_, caller_stack_size_));
  switch_stacks(place_, caller_);
  TELL_SANITIZER(__sanitizer_finish_switch_fiber(own_frames_, &caller_stack_, &caller_stack_size_));
}

// The bottom of every fiber's stack, where the fiber sleeps between bodies. It never returns.
void fiber_main() {
  Fiber* const self = running;
  TELL_SANITIZER(__sanitizer_finish_switch_fiber(nullptr, &self->caller_stack_, &self->caller_stack_size_));
  for (;;) {
    self->body_(self->argument_);
    self->busy_ = false;
    self->switch_to_caller();
  }
}

}  // namespace simt
