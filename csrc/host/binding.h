// What the binding_*.cpp files share. They are the only files that know pybind11; tensors arrive as
// addresses, strides and sizes that the Python side has checked.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>

namespace liteattention::binding {

namespace py = pybind11;

using Triple = std::array<int64_t, 3>;

template <class T>
T* At(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void BindCpu(py::module_& m);
void BindCuda(py::module_& m);
void BindGfx942(py::module_& m);

}  // namespace liteattention::binding
