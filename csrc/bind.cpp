// The extension module: a Python function for every kernel that ops.inc declares.

#include <pybind11/pybind11.h>

#include <algorithm>

#include "bind_call.h"
#include "bind_checks.h"
#include "math.h"
#include "math_sketch.h"
#include "ops.h"

// The twins that are linked in: the emulator's module has no CPU twins, a build for CPUs no CUDA twins.
#if defined(GRADCOMP_SIMT)
#define WITH_CUDA false
#define CPU_TWIN(name) nullptr
#define CUDA_TWIN(name) cuda::name
#elif defined(GRADCOMP_CUDA)
#define WITH_CUDA true
#define CPU_TWIN(name) cpu::name
#define CUDA_TWIN(name) cuda::name
#else
#define WITH_CUDA false
#define CPU_TWIN(name) cpu::name
#define CUDA_TWIN(name) nullptr
#endif

namespace gradcomp {
namespace {

template <class... Args>
void define(py::module_& m, const char* name, const char* parameters, Twin<void (*)(Args...)> cpu,
            Twin<void (*)(Args...)> cuda) {
  m.def(name, Kernel<Args...>(name, parameters, cpu, cuda), py::kw_only(), py::arg("stream") = 0, py::arg("threads") = 1);
}

// The scratch that a kernel needs, as the twin that will run has it. The kernel refuses sizes that no bucket has; the
// words must not overflow before it does.
using Scratch = int64_t (*)(int64_t, int64_t);
void define_scratch(py::module_& m, const char* name, Scratch cpu, Scratch cuda) {
  m.def(name, [=](bool on_cuda, int64_t n, int64_t most) {
    const bool runs_cuda = cpu == nullptr || (on_cuda && cuda != nullptr);
    const auto bounded = [](int64_t size) { return std::clamp<int64_t>(size, 0, int64_t{1} << 40); };
    return (runs_cuda ? cuda : cpu)(bounded(n), bounded(most));
  });
}

}  // namespace
}  // namespace gradcomp

PYBIND11_MODULE(GRADCOMP_MODULE, m) {
  using namespace gradcomp;
  m.doc() = "Kernels of gradcomp. Call them through gradcomp.native.kernels only.";
  m.attr("most_pieces") = Pieces::kMost;
  m.attr("most_ranks") = Spans<float>::kMost;
  m.attr("moments") = kMoments;
  m.attr("line") = kLine;
  m.attr("counters") = kCounters;
  m.attr("largest") = kLargest;
  m.attr("tile") = kSketchTile;
  m.attr("search_block") = SketchPart::kBlock;
  m.attr("built_with_cuda") = WITH_CUDA;
#ifdef GRADCOMP_CUDA
  m.attr("cuda_version") = CUDART_VERSION;  // 13000 for 13.0
#else
  m.attr("cuda_version") = 0;
#endif
#define KERNEL(name, arguments, ...)                                                               \
  define(m, #name, #arguments, Twin<decltype(&cpu::name)>{CPU_TWIN(checks::name), CPU_TWIN(name)}, \
         Twin<decltype(&cpu::name)>{CUDA_TWIN(checks::name), CUDA_TWIN(name)})
#define SCRATCH(name, sizes) define_scratch(m, #name "_scratch", CPU_TWIN(name##_scratch), CUDA_TWIN(name##_scratch))
#include "ops.inc"
}
