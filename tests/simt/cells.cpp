// The cells of the shadow, in pages that are found by their address.

#include "cells.h"

#include <unordered_map>

namespace simt {

namespace {

constexpr size_t kMostPages = 1 << 13;

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
struct {
  uintptr_t key = ~uintptr_t{0};
  Page* page = nullptr;
} recent[64];
uint32_t eras = 0;  // so far
uint32_t era = 0;   // of global memory

}  // namespace

std::vector<std::vector<Readers>> crowds;

void Page::split() {
  bytes = std::make_unique<Cell[]>(kPage);
  for (uintptr_t i = 0; i < kPage; ++i) {
    Cell& cell = bytes[i] = words[i / 4];
    if (cell.others == 0 || cell.era != era || i % 4 == 0) continue;
    crowds.push_back(std::vector<Readers>(crowds[cell.others - 1]));
    cell.others = static_cast<uint32_t>(crowds.size());
  }
}

Page& page_of(uintptr_t key) {
  auto& last = recent[key % 64];
  if (last.key != key) {
    auto& page = pages[key];
    if (page == nullptr) page = std::make_unique<Page>();
    last = {key, page.get()};
  }
  return *last.page;
}

uint32_t next_era() { return ++eras; }
uint32_t era_of_global_memory() { return era; }

void begin_cells() {
  era = next_era();
  crowds.clear();
  if (pages.size() < kMostPages) return;
  pages.clear();
  for (auto& each : recent) each = {};
}

}  // namespace simt
