// The Python face of the kernels: arrays in, checks, the device's twin called without the interpreter lock. One line a kernel.

#include <pybind11/pybind11.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "array.h"
#include "check_ops.h"
#include "math.h"
#include "ops.h"
#include "sketch.h"
#ifdef GRADCOMP_CUDA
#include <cuda_runtime.h>
#endif

namespace gradcomp {
namespace {

// One argument of a call, holding on to what it borrows. get() is what the kernel sees.
template <class T>
struct Slot {
  Slot(py::handle object, const std::string&) : value(object.cast<T>()) {}
  T get() const { return value; }
  template <class Visit>
  void visit(Visit) const {}
  T value;
};

template <class T>
struct Slot<Span<T>> {
  Slot(py::handle object, const std::string& where) {
    if (object.is_none()) return;
    array.emplace(object, where);
    span = {array->template as<T>(), array->size()};
  }
  Span<T> get() const { return span; }
  template <class Visit>
  void visit(Visit seen) const {
    if (array) seen(*array);
  }
  std::optional<Array> array;
  Span<T> span;
};

template <>
struct Slot<const Pieces&> {
  Slot(py::handle object, const std::string& where) {
    for (py::handle item : py::reinterpret_borrow<py::sequence>(object)) {
      EXPECTS(pieces.count < Pieces::kMost, where, " has more than ", Pieces::kMost, " arrays");
      const Array& array = arrays.emplace_back(item, where + "[" + std::to_string(pieces.count) + "]");
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
  Slot(py::handle object, const std::string& where) {
    for (py::handle item : py::reinterpret_borrow<py::sequence>(object)) {
      EXPECTS(spans.count < Spans<T>::kMost, where, " has more than ", Spans<T>::kMost, " arrays");
      const Array& array = arrays.emplace_back(item, where + "[" + std::to_string(spans.count) + "]");
      if (spans.count == 0) spans.size = array.size();
      EXPECTS(array.size() == spans.size, where, "[", spans.count, "] has ", array.size(), " entries, but ", where, "[0] has ",
              spans.size);
      spans.data[spans.count++] = array.template as<T>();
    }
    EXPECTS(spans.count > 0, where, " has no arrays");
  }
  const Spans<T>& get() const { return spans; }
  template <class Visit>
  void visit(Visit seen) const {
    for (const Array& array : arrays) seen(array);
  }
  std::vector<Array> arrays;
  Spans<T> spans;
};

// A kernel's two twins and its checks share one signature; the last argument is the queue, which Python names by stream and
// threads.
template <class... Args>
class Op {
 public:
  using Call = void (*)(Args...);
  static constexpr size_t kArrays = sizeof...(Args) - 1;
  using Names = std::array<const char*, kArrays>;

  Op(const char* name, Names names, Call check, Call cpu, Call cuda)
      : name_(name), names_(names), check_(check), cpu_(cpu), cuda_(cuda) {}

  void operator()(const py::args& args, uintptr_t stream, int threads) const {
    EXPECTS(args.size() == kArrays, name_, " takes ", kArrays, " arguments, not ", args.size());
    bind(args, Queue{reinterpret_cast<void*>(stream), threads}, std::make_index_sequence<kArrays>());
  }

 private:
  template <size_t... I>
  void bind(const py::args& args, Queue queue, std::index_sequence<I...>) const {
    using Types = std::tuple<Args...>;
    const std::tuple<Slot<std::tuple_element_t<I, Types>>...> slots{
        Slot<std::tuple_element_t<I, Types>>(args[I], std::string(name_) + ": " + names_[I])...};
    check_(std::get<I>(slots).get()..., queue);
    const Call twin = choose([&](auto seen) { (std::get<I>(slots).visit(seen), ...); });
    py::gil_scoped_release release;
    twin(std::get<I>(slots).get()..., queue);
  }

  // The twin for the device that all arrays share.
  template <class VisitAll>
  Call choose(VisitAll visit_all) const {
    std::optional<dlpack::Device> device;
    visit_all([&](const Array& array) {
      const dlpack::Device its = array.device();
      if (!device) device = its;
      EXPECTS(its.type == device->type && its.id == device->id, name_, ": its arrays lie on different devices");
    });
    const bool on_cpu = !device || device->type == dlpack::kCpu;
#if defined(GRADCOMP_SIMT)
    EXPECTS(on_cpu, name_, ": the emulator takes CPU arrays only");
    return cuda_;
#elif defined(GRADCOMP_CUDA)
    if (on_cpu) return cpu_;
    int current = 0;
    CUDA_TRY(cudaGetDevice(&current));
    if (current != device->id) CUDA_TRY(cudaSetDevice(device->id));
    return cuda_;
#else
    EXPECTS(on_cpu, name_, ": this gradcomp was built without CUDA; rebuild it where nvcc is found");
    return cpu_;
#endif
  }

  const char* name_;
  Names names_;
  Call check_, cpu_, cuda_;
};

template <class... Args>
void define(py::module_& m, const char* name, void (*check)(Args...), typename Op<Args...>::Call cpu,
            typename Op<Args...>::Call cuda, typename Op<Args...>::Names names) {
  m.def(name, Op<Args...>(name, names, check, cpu, cuda), py::kw_only(), py::arg("stream") = 0, py::arg("threads") = 1);
}

// The scratch a kernel needs is asked of the twin that will run.
using Scratch = int64_t (*)(int64_t, int64_t);
Scratch pick(Scratch cpu, Scratch cuda, bool on_cuda) { return cpu == nullptr || (on_cuda && cuda != nullptr) ? cuda : cpu; }

}  // namespace
}  // namespace gradcomp

// Which twins were linked in: the emulator's module has no CPU twins, a build without nvcc no CUDA ones.
#if defined(GRADCOMP_SIMT)
#define WITH_CPU false
#define TWINS(op) nullptr, cuda::op
#elif defined(GRADCOMP_CUDA)
#define TWINS(op) cpu::op, cuda::op
#define WITH_CUDA true
#else
#define TWINS(op) cpu::op, nullptr
#endif
#ifndef WITH_CUDA
#define WITH_CUDA false
#endif
#ifndef WITH_CPU
#define WITH_CPU true
#endif
#define DEFINE(op, ...) define(m, #op, check::op, TWINS(op), {__VA_ARGS__})
#define DEFINE_SCRATCH(op) \
  m.def(#op "_scratch", [](bool on_cuda, int64_t n, int64_t most) { return pick(TWINS(op##_scratch), on_cuda)(n, most); })

PYBIND11_MODULE(GRADCOMP_MODULE, m) {
  using namespace gradcomp;
  m.doc() = "Kernels of gradcomp; called through gradcomp.native.kernels only.";
  m.attr("most_pieces") = Pieces::kMost;
  m.attr("most_ranks") = Spans<float>::kMost;
  m.attr("moments") = kMoments;
  m.attr("line") = kLine;
  m.attr("tile") = kSketchTile;
  m.attr("built_with_cuda") = WITH_CUDA;
  m.attr("built_with_cpu") = WITH_CPU;
  DEFINE(flatten, "grads", "flat");
  DEFINE(sum_squares, "grads", "squares", "scratch");
  DEFINE(accumulate, "grads", "scales", "value", "velocity", "flag", "moments", "peaks", "scratch", "momentum", "nesterov",
         "raw");
  DEFINE(spread, "flat", "marks", "grads", "scale");
  DEFINE(wipe, "flat", "marks");
  DEFINE(offer_all, "value", "flag", "taken");
  DEFINE(settle_all, "value", "update", "keep");
  DEFINE(take_topk, "value", "velocity", "flag", "peaks", "k", "values", "indices", "header", "scratch");
  DEFINE(add_sparse, "target", "marks", "values", "indices", "header", "scale");
  DEFINE(settle_sparse, "value", "values", "indices", "header", "update", "keep");
  DEFINE(set_thresholds, "moments", "ends", "lam", "from_zero", "about_mean", "skip_zeros", "live", "pooled", "centers",
         "thresholds");
  DEFINE(steer, "lam", "header", "target");
  DEFINE(take_above, "value", "velocity", "flag", "peaks", "ends", "centers", "thresholds", "values", "indices", "header",
         "scratch");
  DEFINE(sketch, "value", "rows", "seed", "table");
  DEFINE(heaviest, "table", "rows", "seed", "n", "indices", "estimates", "scratch");
  DEFINE(pack_sparse, "values", "indices", "header", "value", "blocks", "entries");
  DEFINE(unpack_sparse, "blocks", "entries", "header", "values", "indices");
  DEFINE(add_packed, "target", "marks", "blocks", "entries", "headers", "scale");
  DEFINE(settle_packed, "value", "blocks", "entries", "header", "update", "keep");
  DEFINE(find_levels, "value", "bounds", "form", "group", "count", "levels", "cuts");
  DEFINE(take_levels, "value", "levels", "cuts", "group", "count", "key", "words");
  DEFINE(add_levels, "target", "levels", "words", "headers", "group", "count", "scale");
  DEFINE(settle_levels, "value", "levels", "words", "group", "count", "update", "keep");
  DEFINE_SCRATCH(take_topk);
  DEFINE_SCRATCH(take_above);
  DEFINE_SCRATCH(heaviest);
  DEFINE_SCRATCH(accumulate);
}
