// The Python module simt_selftest. It is apart from its kernels, all of whose static variables are shared ones.

#include "launches.h"
#include "simt.h"

PYBIND11_MODULE(simt_selftest, m) {
  m.def("set_order", [](bool shuffled) { simt::set_order(shuffled ? simt::Order::shuffled : simt::Order::plain); });
  selftest::define_right(m);
  selftest::define_wrong(m);
  selftest::define_orders(m);
}
