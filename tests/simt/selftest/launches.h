// The way from Python to the kernels that test the emulator: a function for each, under its name.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "cuda/launch.cuh"

namespace py = pybind11;

namespace selftest {

constexpr unsigned kBlock = 256;
const gradcomp::Queue queue;

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using U32 = Array<uint32_t>;

inline unsigned blocks_of(const py::array& x, unsigned each = kBlock) { return static_cast<unsigned>(x.size()) / each; }

void define_right(py::module_& m);
void define_wrong(py::module_& m);
void define_orders(py::module_& m);

}  // namespace selftest

#define DEFINE(name, args, ...) m.def(#name, [] args { LAUNCH(name, __VA_ARGS__); })
