// A Python array (torch, NumPy, CuPy: anything with __dlpack__) borrowed for one call, and every check that a borrowed array
// needs.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "check.h"
#include "dlpack.h"
#include "span.h"

namespace gradcomp {

namespace py = pybind11;

inline std::string type_name(dlpack::Type type) {
  const char* kind = type.code == dlpack::kFloat    ? "float"
                     : type.code == dlpack::kBfloat ? "bfloat"
                     : type.code == dlpack::kInt    ? "int"
                     : type.code == dlpack::kUint   ? "uint"
                                                    : "an unknown type of bits ";
  return kind + std::to_string(type.bits);
}

template <class T>
constexpr dlpack::Type type_of() {
  constexpr uint8_t code = std::is_floating_point_v<T> ? dlpack::kFloat : std::is_signed_v<T> ? dlpack::kInt : dlpack::kUint;
  return {code, sizeof(T) * 8, 1};
}

class Array {
 public:
  Array(py::handle object, const std::string& where) : where_(where) {
    if (!py::hasattr(object, "__dlpack__")) {
      throw py::type_error(where + ": an array of torch, NumPy or CuPy is needed, not " +
                           std::string(py::str(py::type::of(object))));
    }
    const auto device = object.attr("__dlpack_device__")().cast<std::pair<int32_t, int32_t>>();
    // -1: the producer must not make any stream wait; the caller passes the stream its array lives on.
    capsule_ = device.first == dlpack::kCpu ? object.attr("__dlpack__")() : object.attr("__dlpack__")(py::arg("stream") = -1);
    managed_ = static_cast<dlpack::Managed*>(PyCapsule_GetPointer(capsule_.ptr(), "dltensor"));
    if (managed_ == nullptr) throw py::error_already_set();
    PyCapsule_SetName(capsule_.ptr(), "used_dltensor");
    check_contiguous();
  }
  Array(Array&& other) noexcept
      : where_(std::move(other.where_)),
        capsule_(std::move(other.capsule_)),
        managed_(std::exchange(other.managed_, nullptr)) {}
  ~Array() {
    if (managed_ != nullptr && managed_->release != nullptr) managed_->release(managed_);
  }

  int64_t size() const {
    int64_t size = 1;
    for (int i = 0; i < tensor().ndim; ++i) size *= tensor().shape[i];
    return size;
  }

  void* data() const { return static_cast<char*>(tensor().data) + tensor().byte_offset; }

  // Pinned and managed memory counts as what a kernel may use it from: the device that made it.
  dlpack::Device device() const { return tensor().device; }

  template <class T>
  T* as() const {
    constexpr dlpack::Type wanted = type_of<std::remove_const_t<T>>();
    const dlpack::Type type = tensor().dtype;
    // Words without a meaning (scratch) may be of either sign.
    const bool same_code = type.code == wanted.code || (wanted.code == dlpack::kUint && type.code == dlpack::kInt);
    EXPECTS(same_code && type.bits == wanted.bits && type.lanes == 1, where_, " is ", type_name(type), ", but ",
            type_name(wanted), " is needed");
    return static_cast<T*>(data());
  }

  Dtype gradient_type() const {
    const dlpack::Type type = tensor().dtype;
    if (type.code == dlpack::kFloat && type.bits == 32) return Dtype::f32;
    if (type.code == dlpack::kFloat && type.bits == 16) return Dtype::f16;
    if (type.code == dlpack::kBfloat && type.bits == 16) return Dtype::bf16;
    fail(where_, " is ", type_name(type), ", but float32, float16 or bfloat16 is needed");
  }

 private:
  const dlpack::Tensor& tensor() const { return managed_->tensor; }

  void check_contiguous() const {
    int64_t expected = 1;
    for (int i = tensor().ndim - 1; tensor().strides != nullptr && i >= 0; --i) {
      const int64_t extent = tensor().shape[i];
      if (extent == 0) return;
      EXPECTS(extent == 1 || tensor().strides[i] == expected, where_, " is not contiguous");
      expected *= extent;
    }
  }

  std::string where_;
  py::object capsule_;
  dlpack::Managed* managed_ = nullptr;
};

}  // namespace gradcomp
