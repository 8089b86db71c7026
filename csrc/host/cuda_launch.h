// Repeated launches of a compiled CUDA kernel, whose parameters stay but for addresses.
//
// Only CUDA's driver is used, opened at run time: nothing links against CUDA, and nothing here
// depends on the compiler that made the kernel.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace liteattention::cuda {

using Result = int;  // CUresult, 0 is success
using Function = void*;
using Stream = void*;
using Context = void*;

inline constexpr size_t kMapBytes = 128;  // of a CUtensorMap, which lies at multiples of 64
inline constexpr size_t kMostDimensions = 5;

// What the bulk copy engine knows of a tensor but its address, as cuTensorMapEncodeTiled takes it:
// dimensions from the innermost on.
struct Box {
    int data_type = 0;  // CUtensorMapDataType
    int swizzle = 0;    // CUtensorMapSwizzle
    uint32_t dimensions = 0;
    std::array<uint64_t, kMostDimensions> sizes = {};
    std::array<uint64_t, kMostDimensions> byte_strides = {};  // of all but the innermost
    std::array<uint32_t, kMostDimensions> block = {};
    uint64_t last_byte = 0;  // where its last element begins, and one
};
struct Pointer {};
struct Value {
    std::array<unsigned char, 8> bytes = {};
    size_t size = 0;
};
// A kernel's parameter: a tensor map, a pointer, or a number that stays.
using Parameter = std::variant<Box, Pointer, Value>;

struct Shape {
    std::array<unsigned, 3> grid = {1, 1, 1};
    unsigned threads = 0;
    unsigned shared_bytes = 0;
    // It may begin before its predecessor in the stream has ended (programmatic dependent launch).
    bool early = false;
};

// Thrown if the driver refuses a launch.
struct Failed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Kernel {
   public:
    // Null if there is no CUDA driver with the functions that this needs, or if the loaded kernel
    // has other parameters by number or size.
    static std::unique_ptr<Kernel> Make(Function function, const Shape& shape,
                                        std::vector<Parameter> parameters);

    size_t boxes() const { return boxes_.size(); }
    size_t pointers() const { return pointers_; }

    // Addresses of the boxes and of the pointers, in the order of the parameters. False, and
    // nothing launched, if this thread has no current context. Threads may launch at the same time.
    bool Launch(Stream stream, const uintptr_t* boxed, const uintptr_t* addresses) const;

   private:
    Kernel() = default;

    Function function_ = nullptr;
    Shape shape_;
    std::vector<Box> boxes_;
    size_t pointers_ = 0;
    // Where each parameter's bytes come from: of maps and pointers by their number, else of
    // values_.
    enum class Kind : uint8_t { kMap, kPointer, kValue };
    std::vector<std::pair<Kind, uint32_t>> order_;
    std::vector<std::array<unsigned char, 8>> values_;
};

}  // namespace liteattention::cuda
