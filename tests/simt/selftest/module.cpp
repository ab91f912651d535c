// The Python module simt_selftest. It is apart from its kernels: all static variables of their files are shared ones.

#include "launches.h"

PYBIND11_MODULE(simt_selftest, m) {
  selftest::define_right(m);
  selftest::define_wrong(m);
  selftest::define_orders(m);
}
