// A Python array (torch, NumPy, CuPy: anything with __dlpack__) that is borrowed for one call, and the checks of its type.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "bind_dlpack.h"
#include "expects.h"
#include "span.h"

namespace gradcomp {

namespace py = pybind11;

// The argument that a message is about: "take_topk: values", or with an item "flatten: grads[3]".
struct Where {
  std::string_view kernel, argument;
  int item = -1;

  friend std::ostream& operator<<(std::ostream& out, const Where& where) {
    out << where.kernel << ": " << where.argument;
    return where.item < 0 ? out : out << '[' << where.item << ']';
  }
};

inline std::string type_name(dlpack::Type type) {
  const char* kind = type.code == dlpack::kFloat    ? "float"
                     : type.code == dlpack::kBfloat ? "bfloat"
                     : type.code == dlpack::kInt    ? "int"
                     : type.code == dlpack::kUint   ? "uint"
                                                    : "an unknown type of bits ";
  return kind + std::to_string(type.bits);
}

inline std::string device_name(dlpack::Device device) {
  return device.type == dlpack::kCpu ? "the CPU" : "cuda:" + std::to_string(device.id);
}

template <class T>
constexpr dlpack::Type type_of() {
  constexpr uint8_t code = std::is_floating_point_v<T> ? dlpack::kFloat : std::is_signed_v<T> ? dlpack::kInt : dlpack::kUint;
  return {code, sizeof(T) * 8, 1};
}

// The fast way into arrays of this type, or null. The last answer is kept, since calls come with many arrays of one type.
inline const dlpack::Exchange* exchange_of(PyTypeObject* type) {
  static PyTypeObject* last = nullptr;
  static const dlpack::Exchange* found = nullptr;
  if (type != last) {
    const py::object capsule = py::getattr(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__", py::none());
    found = nullptr;
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
      found = static_cast<const dlpack::Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (found->version.major != 1 || found->describe == nullptr) found = nullptr;
    }
    Py_XDECREF(reinterpret_cast<PyObject*>(std::exchange(last, type)));
    Py_INCREF(reinterpret_cast<PyObject*>(type));
  }
  return found;
}

class Array {
 public:
  Array(py::handle object, const Where& where) : where_(where) {
    if (const dlpack::Exchange* exchange = exchange_of(Py_TYPE(object.ptr()))) {
      owner_ = py::reinterpret_borrow<py::object>(object);
      if (exchange->describe(object.ptr(), &tensor_) != 0) throw py::error_already_set();
    } else {
      take_over(object);
    }
    check_contiguous();
    check_aligned();
  }
  Array(Array&& other) noexcept
      : where_(other.where_),
        owner_(std::move(other.owner_)),
        managed_(std::exchange(other.managed_, nullptr)),
        tensor_(other.tensor_) {}
  ~Array() {
    if (managed_ != nullptr && managed_->release != nullptr) managed_->release(managed_);
  }

  int64_t size() const {
    int64_t size = 1;
    for (int i = 0; i < tensor_.ndim; ++i) size *= tensor_.shape[i];
    return size;
  }

  void* data() const { return static_cast<char*>(tensor_.data) + tensor_.byte_offset; }

  const Where& where() const { return where_; }

  // Pinned and managed memory belongs to the device that made it: a kernel may use it from there.
  dlpack::Device device() const { return tensor_.device; }

  template <class T>
  T* as() const {
    constexpr dlpack::Type wanted = type_of<std::remove_const_t<T>>();
    const dlpack::Type type = tensor_.dtype;
    // Words may be signed or not: torch has few operations for unsigned ones.
    const bool same_code = type.code == wanted.code || (wanted.code == dlpack::kUint && type.code == dlpack::kInt);
    EXPECTS(same_code && type.bits == wanted.bits && type.lanes == 1, where_, " is ", type_name(type), ", but must be ",
            type_name(wanted));
    return static_cast<T*>(data());
  }

  Dtype gradient_type() const {
    const dlpack::Type type = tensor_.dtype;
    if (type.code == dlpack::kFloat && type.bits == 32) return Dtype::f32;
    if (type.code == dlpack::kFloat && type.bits == 16) return Dtype::f16;
    if (type.code == dlpack::kBfloat && type.bits == 16) return Dtype::bf16;
    fail(where_, " is ", type_name(type), ", but must be float32, float16 or bfloat16");
  }

 private:
  // Use the way in that every library has.
  void take_over(py::handle object) {
    if (!py::hasattr(object, "__dlpack__")) {
      throw py::type_error(
          join(where_, " must be an array of torch, NumPy or CuPy, not ", std::string(py::str(py::type::of(object)))));
    }
    const auto device = object.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
    // -1 asks the producer to make no stream wait: the kernel runs on the stream that the array lives on.
    owner_ = device.first == dlpack::kCpu ? object.attr("__dlpack__")() : object.attr("__dlpack__")(py::arg("stream") = -1);
    managed_ = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(owner_.ptr(), "dltensor"));
    if (managed_ == nullptr) throw py::error_already_set();
    PyCapsule_SetName(owner_.ptr(), "used_dltensor");
    tensor_ = managed_->tensor;
  }

  void check_contiguous() const {
    int64_t expected = 1;
    for (int i = tensor_.ndim - 1; tensor_.strides != nullptr && i >= 0; --i) {
      const int64_t extent = tensor_.shape[i];
      if (extent == 0) return;
      EXPECTS(extent == 1 || tensor_.strides[i] == expected, where_, " is not contiguous: pass .contiguous()");
      expected *= extent;
    }
  }

  // NumPy can make an array that begins between two addresses of its type, which no kernel reads.
  void check_aligned() const {
    const uintptr_t item = std::max(tensor_.dtype.bits / 8, 1);
    EXPECTS(reinterpret_cast<uintptr_t>(data()) % item == 0, where_, " begins at an address that is no multiple of ", item,
            ": pass a copy");
  }

  Where where_;
  py::object owner_;  // the array itself, or the capsule it came in
  dlpack::Managed* managed_ = nullptr;
  dlpack::Tensor tensor_{};
};

}  // namespace gradcomp
