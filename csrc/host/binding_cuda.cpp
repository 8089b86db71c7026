// Repeated launches of CUDA kernels as Python sees them.
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding.h"
#include "cuda_launch.h"

namespace liteattention::binding {

namespace {

constexpr size_t kMostAddresses = 64;

// (data type, swizzle, sizes, strides in elements, block, bytes of an element), outermost first.
using BoxTuple = std::tuple<int, int, std::vector<uint64_t>, std::vector<uint64_t>,
                            std::vector<uint32_t>, uint64_t>;

cuda::Box ToBox(const BoxTuple& given) {
    const auto& [data_type, swizzle, sizes, strides, block, bytes] = given;
    const size_t count = sizes.size();
    if (count == 0 || count > cuda::kMostDimensions || strides.size() != count ||
        block.size() != count)
        throw py::value_error("a box has 1 to 5 dimensions");
    cuda::Box box;
    box.data_type = data_type;
    box.swizzle = swizzle;
    box.dimensions = static_cast<uint32_t>(count);
    for (size_t i = 0; i < count; ++i) {
        box.sizes[i] = sizes[count - 1 - i];
        box.block[i] = block[count - 1 - i];
        if (i + 1 < count) box.byte_strides[i] = bytes * strides[count - 2 - i];
        box.last_byte += (box.sizes[i] - 1) * (i == 0 ? bytes : box.byte_strides[i - 1]);
    }
    ++box.last_byte;
    return box;
}

cuda::Parameter ToParameter(py::handle given) {
    if (given.is_none()) return cuda::Pointer{};
    if (!py::isinstance<py::bytes>(given)) return ToBox(given.cast<BoxTuple>());
    const std::string bytes = given.cast<std::string>();
    cuda::Value value;
    if (bytes.empty() || bytes.size() > value.bytes.size())
        throw py::value_error("a number has 1 to 8 bytes");
    std::memcpy(value.bytes.data(), bytes.data(), bytes.size());
    value.size = bytes.size();
    return value;
}

std::unique_ptr<cuda::Kernel> MakeKernel(uintptr_t function, std::array<unsigned, 3> grid,
                                         unsigned threads, unsigned shared_bytes, bool early,
                                         const py::list& parameters) {
    std::vector<cuda::Parameter> made;
    for (const py::handle given : parameters) made.push_back(ToParameter(given));
    return cuda::Kernel::Make(At<void>(function), {grid, threads, shared_bytes, early},
                              std::move(made));
}

uintptr_t ToAddress(PyObject* number) {
    const unsigned long long address = PyLong_AsUnsignedLongLong(number);
    if (address == static_cast<unsigned long long>(-1) && PyErr_Occurred())
        throw py::error_already_set();
    return static_cast<uintptr_t>(address);
}

bool LaunchKernel(const cuda::Kernel& kernel, uintptr_t stream, const py::tuple& boxed,
                  const py::tuple& addresses) {
    static PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
    if (boxed.size() != kernel.boxes() || addresses.size() != kernel.pointers() ||
        boxed.size() + addresses.size() > kMostAddresses)
        throw py::value_error("this kernel takes " + std::to_string(kernel.boxes()) +
                              " tensors and " + std::to_string(kernel.pointers()) +
                              " addresses, got " + std::to_string(boxed.size()) + " and " +
                              std::to_string(addresses.size()));
    std::array<uintptr_t, kMostAddresses> found;
    size_t count = 0;
    for (size_t i = 0; i < boxed.size(); ++i) {
        PyObject* const tensor = PyTuple_GET_ITEM(boxed.ptr(), static_cast<Py_ssize_t>(i));
        const auto number =
            py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, data_ptr));
        if (!number) throw py::error_already_set();
        found[count++] = ToAddress(number.ptr());
    }
    for (size_t i = 0; i < addresses.size(); ++i)
        found[count++] = ToAddress(PyTuple_GET_ITEM(addresses.ptr(), static_cast<Py_ssize_t>(i)));
    const py::gil_scoped_release release;  // a launch waits while the device's queue is full
    return kernel.Launch(At<void>(stream), found.data(), found.data() + kernel.boxes());
}

}  // namespace

void BindCuda(py::module_& m) {
    py::class_<cuda::Kernel>(m, "CudaKernel").def("__call__", &LaunchKernel);
    m.def("cuda_kernel", &MakeKernel);
}

}  // namespace liteattention::binding
