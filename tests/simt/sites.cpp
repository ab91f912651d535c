// Places in the code, from the addresses of the machine code that are noted while it runs.

#include <dlfcn.h>

#include <cstdio>

#include "threads.h"

// The begin of this module in memory, which the linker knows.
extern const char module_begin[] __asm__("__ehdr_start") __attribute__((visibility("hidden")));

namespace simt {

namespace {

// The stand-ins for CUDA's functions are inlined into kernels; the line of the kernel is the one that counts.
bool is_of_emulator(const std::string& line) {
  return line.find("/tests/simt/") != std::string::npos && line.find("/selftest/") == std::string::npos;
}

}  // namespace

uint32_t offset_of(const void* site) { return static_cast<uint32_t>(static_cast<const char*>(site) - module_begin); }

std::string line_of(const void* site) { return line_of(offset_of(site)); }

std::string line_of(uint32_t offset) {
  Dl_info info;
  if (dladdr(module_begin, &info) == 0) return "an unknown place";
  char number[32];
  std::snprintf(number, sizeof number, "0x%x", offset - 1);  // the call itself, before the place that it returns to
  const std::string command = std::string("addr2line -i -e '") + info.dli_fname + "' " + number + " 2>/dev/null";
  std::string found = std::string("the code at ") + number;
  FILE* const pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return found;
  char buffer[1024];
  bool kernel = false;
  while (std::fgets(buffer, sizeof buffer, pipe) != nullptr) {
    std::string line(buffer);
    line.erase(line.find_last_not_of('\n') + 1);
    line.erase(std::min(line.size(), line.find(" (")));
    if (kernel || line.find("??") != std::string::npos || is_of_emulator(line)) continue;
    found = line.substr(line.find_last_of('/') + 1);
    kernel = true;
  }
  pclose(pipe);
  return found;
}

std::string name_of(uintptr_t at) {
  char text[64];
  std::snprintf(text, sizeof text, "%s memory at 0x%zx", is_shared(reinterpret_cast<const void*>(at)) ? "shared" : "global",
                static_cast<size_t>(at));
  return text;
}

}  // namespace simt
