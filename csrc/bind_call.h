// A call from Python: arrays become a kernel's arguments, are checked, and go to the twin for their device.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind_array.h"
#include "expects.h"
#include "span.h"
#ifdef GRADCOMP_CUDA
#include "bind_device.h"
#endif

namespace gradcomp {

// One argument of a call, which holds on to the arrays that it borrows. get() is the kernel's argument.
template <class T>
struct Slot {
  Slot(py::handle object, const Where& where) {
    try {
      value = object.cast<T>();
    } catch (const py::cast_error&) {
      fail(where, "=", std::string(py::repr(object)), " must be ", expected());
    }
  }
  static const char* expected() {
    return std::is_same_v<T, bool> ? "true or false" : std::is_integral_v<T> ? "a whole number below 2^63" : "a number";
  }
  T get() const { return value; }
  template <class Visit>
  void visit(Visit) const {}
  T value{};
};

// A list or tuple of arrays. at() holds an item: reading an array may run code of its library, which could change the list.
class Items {
 public:
  Items(py::handle object, const Where& where) : object_(object.ptr()), is_list_(PyList_Check(object_)) {
    EXPECTS(is_list_ || PyTuple_Check(object_), where, " must be a list of arrays, not ",
            std::string(py::str(py::type::of(object))));
  }
  Py_ssize_t size() const { return is_list_ ? PyList_GET_SIZE(object_) : PyTuple_GET_SIZE(object_); }
  py::object at(Py_ssize_t i) const {
    return py::reinterpret_borrow<py::object>(is_list_ ? PyList_GET_ITEM(object_, i) : PyTuple_GET_ITEM(object_, i));
  }

 private:
  PyObject* object_;
  bool is_list_;
};

template <class T>
struct Slot<Span<T>> {
  Slot(py::handle object, const Where& where) : array(object, where), span{array.template as<T>(), array.size()} {}
  Span<T> get() const { return span; }
  template <class Visit>
  void visit(Visit seen) const {
    seen(array);
  }
  Array array;
  Span<T> span;
};

template <class T>
struct Slot<OptionalSpan<T>> {
  Slot(py::handle object, const Where& where) {
    if (!object.is_none()) slot.emplace(object, where);
  }
  OptionalSpan<T> get() const { return slot ? OptionalSpan<T>{slot->get(), true} : OptionalSpan<T>{}; }
  template <class Visit>
  void visit(Visit seen) const {
    if (slot) slot->visit(seen);
  }
  std::optional<Slot<Span<T>>> slot;
};

template <>
struct Slot<const Pieces&> {
  Slot(py::handle object, const Where& where) {
    const Items items(object, where);
    EXPECTS(items.size() <= Pieces::kMost, where, " must be at most ", Pieces::kMost, " arrays");
    arrays.reserve(static_cast<size_t>(items.size()));
    while (pieces.count < std::min<Py_ssize_t>(items.size(), Pieces::kMost)) {
      const Array& array = arrays.emplace_back(items.at(pieces.count), Where{where.kernel, where.argument, pieces.count});
      pieces.dtype[pieces.count] = array.gradient_type();
      pieces.data[pieces.count] = array.data();
      pieces.begin[pieces.count + 1] = pieces.begin[pieces.count] + array.size();
      ++pieces.count;
    }
  }
  const Pieces& get() const { return pieces; }
  template <class Visit>
  void visit(Visit seen) const {
    for (const Array& array : arrays) seen(array);
  }
  std::vector<Array> arrays;
  Pieces pieces;
};

template <class T>
struct Slot<const Spans<T>&> {
  Slot(py::handle object, const Where& where) {
    const Items items(object, where);
    EXPECTS(items.size() <= Spans<T>::kMost, where, " must be at most ", Spans<T>::kMost, " arrays");
    arrays.reserve(static_cast<size_t>(items.size()));
    while (spans.count < std::min<Py_ssize_t>(items.size(), Spans<T>::kMost)) {
      const Array& array = arrays.emplace_back(items.at(spans.count), Where{where.kernel, where.argument, spans.count});
      if (spans.count == 0) spans.size = array.size();
      EXPECTS(array.size() == spans.size, where, "[", spans.count, "] has ", array.size(), " entries, but ", where.argument,
              "[0] has ", spans.size);
      spans.data[spans.count++] = array.template as<T>();
    }
    EXPECTS(spans.count > 0, where, " must be at least one array");
  }
  const Spans<T>& get() const { return spans; }
  template <class Visit>
  void visit(Visit seen) const {
    for (const Array& array : arrays) seen(array);
  }
  std::vector<Array> arrays;
  Spans<T> spans;
};

// The names in a list of parameters as C++ writes it, "(Span<float> residual, int64_t k)": the last word of each.
inline std::vector<std::string_view> names_in(std::string_view parameters) {
  std::vector<std::string_view> names;
  while (!parameters.empty()) {
    const size_t end = parameters.find_first_of(",)"), begin = parameters.find_last_of(' ', end) + 1;
    names.push_back(parameters.substr(begin, end - begin));
    parameters.remove_prefix(end + 1);
  }
  return names;
}

// The checks of a twin, and the twin. Both are null where it was not built.
template <class Call>
struct Twin {
  Call check = nullptr, run = nullptr;
};

// A kernel as Python calls it. Its last argument is the queue, which Python names by stream and threads.
template <class... Args>
class Kernel {
 public:
  using Call = void (*)(Args...);
  static constexpr size_t kCount = sizeof...(Args) - 1;

  Kernel(const char* name, const char* parameters, Twin<Call> cpu, Twin<Call> cuda)
      : name_(name), names_(names_in(parameters)), cpu_(cpu), cuda_(cuda) {}

  void operator()(const py::args& args, uintptr_t stream, int threads) const {
    EXPECTS(args.size() == kCount, name_, " takes ", kCount, " arguments, not ", args.size());
    call(args, Queue{reinterpret_cast<void*>(stream), threads}, std::make_index_sequence<kCount>());
  }

 private:
  template <size_t... I>
  void call(const py::args& args, Queue queue, std::index_sequence<I...>) const {
    using Types = std::tuple<Args...>;
    const std::tuple<Slot<std::tuple_element_t<I, Types>>...> slots{
        Slot<std::tuple_element_t<I, Types>>(args[I], Where{name_, names_[I]})...};
    const auto device = shared_device([&](auto seen) { (std::get<I>(slots).visit(seen), ...); });
    const Twin<Call>& twin = twin_for(device);
    twin.check(std::get<I>(slots).get()..., queue);
#ifdef GRADCOMP_CUDA
    std::optional<CurrentDevice> current;
    if (&twin == &cuda_) {
      current.emplace(device->id);
      devices_seen_.see(name_, device->id, static_cast<cudaStream_t>(queue.stream));
    }
#endif
    // A launch takes microseconds, and Python's lock, once given away, comes back after milliseconds from a busy thread.
    std::optional<py::gil_scoped_release> release;
    if (&twin == &cpu_) release.emplace();
#if defined(GRADCOMP_SIMT)
    // Scratch holds whatever an earlier call has left, or worse.
    (spoil_scratch(names_[I], std::get<I>(slots).get()), ...);
#endif
    twin.run(std::get<I>(slots).get()..., queue);
  }

#if defined(GRADCOMP_SIMT)
  template <class T>
  static void spoil_scratch(std::string_view name, const T& argument) {
    if constexpr (std::is_base_of_v<Span<uint32_t>, T>) {
      if (name == "scratch") std::fill_n(argument.data, argument.size, 0xCDCDCDCDu);
    }
  }
#endif

  // The device that all arrays share; none if there are no arrays.
  template <class VisitAll>
  std::optional<dlpack::Device> shared_device(VisitAll visit_all) const {
    std::optional<dlpack::Device> device;
    Where first{};
    visit_all([&](const Array& array) {
      const dlpack::Device its = array.device();
      if (!device) {
        device = its;
        first = array.where();
      }
      EXPECTS(its.type == device->type && its.id == device->id, array.where(), " is on ", device_name(its), ", but ",
              first.argument, " is on ", device_name(*device), ": move all arrays to one device");
    });
    return device;
  }

  const Twin<Call>& twin_for(std::optional<dlpack::Device> device) const {
    const bool on_cpu = !device || device->type == dlpack::kCpu;
#if defined(GRADCOMP_SIMT)
    EXPECTS(on_cpu, name_, ": its arrays must lie in main memory: the emulator has no device");
    return cuda_;
#elif defined(GRADCOMP_CUDA)
    return on_cpu ? cpu_ : cuda_;
#else
    EXPECTS(on_cpu, name_, ": this gradcomp was built without CUDA: rebuild it with GRADCOMP_CUDA=ON, which needs nvcc");
    return cpu_;
#endif
  }

  const char* name_;
  std::vector<std::string_view> names_;
  Twin<Call> cpu_, cuda_;
#ifdef GRADCOMP_CUDA
  mutable DevicesSeen devices_seen_;
#endif
};

}  // namespace gradcomp
