#include "cuda_launch.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstring>
#include <utility>

namespace liteattention::cuda {
namespace {

constexpr unsigned kProgrammaticStreamSerialization = 6;  // of CUlaunchAttributeID
// Up to this one, the driver sets a bit in maps of small tensors that must not be set (CUTLASS,
// commit b7ecaa605dd70326900433695e11ebfec407edd2).
constexpr int kLastWithSmallMaps = 13010;
constexpr uint64_t kSmallBytes = 128 << 10;
constexpr uint64_t kSmallBit = uint64_t{1} << 21;  // of the second word
constexpr size_t kMostParameters = 128;
constexpr size_t kMostBoxes = 8;

// As cuda.h has them since CUDA 12.
struct LaunchAttribute {
    unsigned id = 0;
    char pad[4] = {};
    union {
        char bytes[64];
        int flag;
    } value = {};
};
struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    Stream stream;
    LaunchAttribute* attributes;
    unsigned attribute_count;
};
static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56);

// X(name, parameters)
#define LITEATTENTION_CUDA_FUNCTIONS(X)                                                      \
    X(cuDriverGetVersion, (int* version))                                                    \
    X(cuCtxGetCurrent, (Context*))                                                           \
    X(cuFuncGetParamInfo, (Function, size_t index, size_t* offset, size_t* size))            \
    X(cuGetErrorString, (Result, const char**))                                              \
    X(cuLaunchKernelEx, (const LaunchConfig*, Function, void** parameters, void** extra))    \
    X(cuTensorMapEncodeTiled,                                                                \
      (void* map, int data_type, uint32_t dimensions, void* address, const uint64_t* sizes,  \
       const uint64_t* byte_strides, const uint32_t* block, const uint32_t* element_strides, \
       int interleave, int swizzle, int l2_promotion, int fill))

struct Driver {
#define LITEATTENTION_DECLARE(name, parameters) Result(*name) parameters = nullptr;
    LITEATTENTION_CUDA_FUNCTIONS(LITEATTENTION_DECLARE)
#undef LITEATTENTION_DECLARE
    bool complete = false;
    bool encodes_small = true;
};

const Driver& TheDriver() {
    static const Driver driver = [] {
        Driver found;
        void* const handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
        if (!handle) return found;
        found.complete = true;
#define LITEATTENTION_FIND(name, parameters)                                   \
    found.name = reinterpret_cast<decltype(found.name)>(dlsym(handle, #name)); \
    found.complete = found.complete && found.name;
        LITEATTENTION_CUDA_FUNCTIONS(LITEATTENTION_FIND)
#undef LITEATTENTION_FIND
        int version = 0;
        found.encodes_small = !found.complete || found.cuDriverGetVersion(&version) != 0 ||
                              version > kLastWithSmallMaps;
        return found;
    }();
    return driver;
}

void Check(Result result, const char* what) {
    if (result == 0) return;
    const char* text = nullptr;
    if (TheDriver().cuGetErrorString(result, &text) != 0 || !text) text = "unknown error";
    throw Failed(std::string(what) + " failed: " + text + " (" + std::to_string(result) + ")");
}

size_t SizeOf(const Parameter& parameter) {
    if (std::holds_alternative<Box>(parameter)) return kMapBytes;
    if (const Value* value = std::get_if<Value>(&parameter)) return value->size;
    return sizeof(uintptr_t);
}

bool Takes(Function function, const std::vector<Parameter>& parameters) {
    const Driver& driver = TheDriver();
    size_t offset = 0, size = 0;
    for (size_t i = 0; i < parameters.size(); ++i) {
        if (driver.cuFuncGetParamInfo(function, i, &offset, &size) != 0) return false;
        if (size != SizeOf(parameters[i])) return false;
    }
    return driver.cuFuncGetParamInfo(function, parameters.size(), &offset, &size) != 0;
}

void Encode(const Box& box, uintptr_t address, void* map) {
    constexpr int kNoInterleave = 0, kPromote128Bytes = 2, kFillZeros = 0;
    static constexpr uint32_t kSteps[kMostDimensions] = {1, 1, 1, 1, 1};
    Check(TheDriver().cuTensorMapEncodeTiled(
              map, box.data_type, box.dimensions, reinterpret_cast<void*>(address),
              box.sizes.data(), box.byte_strides.data(), box.block.data(), kSteps, kNoInterleave,
              box.swizzle, kPromote128Bytes, kFillZeros),
          "cuTensorMapEncodeTiled");
    if (TheDriver().encodes_small || box.last_byte >= kSmallBytes) return;
    uint64_t words[2];
    std::memcpy(words, map, sizeof(words));
    words[1] &= ~kSmallBit;
    std::memcpy(map, words, sizeof(words));
}

}  // namespace

std::unique_ptr<Kernel> Kernel::Make(Function function, const Shape& shape,
                                     std::vector<Parameter> parameters) {
    if (!TheDriver().complete || parameters.size() > kMostParameters) return nullptr;
    if (!Takes(function, parameters)) return nullptr;
    std::unique_ptr<Kernel> made(new Kernel);
    made->function_ = function;
    made->shape_ = shape;
    for (const Parameter& parameter : parameters) {
        if (const Box* box = std::get_if<Box>(&parameter)) {
            made->order_.emplace_back(Kind::kMap, made->boxes_.size());
            made->boxes_.push_back(*box);
        } else if (const Value* value = std::get_if<Value>(&parameter)) {
            made->order_.emplace_back(Kind::kValue, made->values_.size());
            made->values_.push_back(value->bytes);
        } else {
            made->order_.emplace_back(Kind::kPointer, made->pointers_++);
        }
    }
    return made->boxes_.size() > kMostBoxes ? nullptr : std::move(made);
}

bool Kernel::Launch(Stream stream, const uintptr_t* boxed, const uintptr_t* addresses) const {
    const Driver& driver = TheDriver();
    Context context = nullptr;
    if (driver.cuCtxGetCurrent(&context) != 0 || !context) return false;
    alignas(64) unsigned char maps[kMostBoxes][kMapBytes];
    for (size_t i = 0; i < boxes_.size(); ++i) Encode(boxes_[i], boxed[i], maps[i]);
    void* parameters[kMostParameters];
    for (size_t i = 0; i < order_.size(); ++i) {
        const auto [kind, at] = order_[i];
        // The driver copies what these point to.
        const void* const from = kind == Kind::kMap       ? static_cast<const void*>(maps[at])
                                 : kind == Kind::kPointer ? static_cast<const void*>(addresses + at)
                                                          : values_[at].data();
        parameters[i] = const_cast<void*>(from);
    }
    LaunchAttribute early;
    early.id = kProgrammaticStreamSerialization;
    early.value.flag = 1;
    const LaunchConfig config = {{shape_.grid[0], shape_.grid[1], shape_.grid[2]},
                                 {shape_.threads, 1, 1},
                                 shape_.shared_bytes,
                                 stream,
                                 &early,
                                 shape_.early ? 1u : 0u};
    Check(driver.cuLaunchKernelEx(&config, function_, parameters, nullptr), "cuLaunchKernelEx");
    return true;
}

}  // namespace liteattention::cuda
