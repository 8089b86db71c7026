// The part of the HIP run-time that launches need, opened at run time: nothing links against ROCm.
#pragma once

#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>

namespace liteattention::hip {

using Error = int;  // hipError_t, 0 is success
using Stream = void*;
using Module = void*;
using Function = void*;

inline constexpr int kAttributeMultiprocessorCount = 63;  // of hipDeviceAttribute_t, HIP 5 to 7

// hipModuleLaunchKernel takes its arguments as one buffer of known size behind these tags.
inline void* const kLaunchBufferPointer = reinterpret_cast<void*>(1);
inline void* const kLaunchBufferSize = reinterpret_cast<void*>(2);
inline void* const kLaunchBufferEnd = reinterpret_cast<void*>(3);

// X(name, parameters, result): signatures as in HIP 6 and 7.
#define LITEATTENTION_HIP_FUNCTIONS(X)                                                         \
    X(hipInit, (unsigned flags), Error)                                                        \
    X(hipGetDeviceCount, (int* count), Error)                                                  \
    X(hipGetDevice, (int* device), Error)                                                      \
    X(hipSetDevice, (int device), Error)                                                       \
    X(hipDeviceGetAttribute, (int* value, int attribute, int device), Error)                   \
    X(hipRuntimeGetVersion, (int* version), Error)                                             \
    X(hipModuleLoadData, (Module * module, const void* image), Error)                          \
    X(hipModuleUnload, (Module module), Error)                                                 \
    X(hipModuleGetFunction, (Function * function, Module module, const char* name), Error)     \
    X(hipModuleLaunchKernel,                                                                   \
      (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
       unsigned block_y, unsigned block_z, unsigned lds_bytes, Stream stream, void** params,   \
       void** extra),                                                                          \
      Error)                                                                                   \
    X(hipHostRegister, (void* memory, size_t bytes, unsigned flags), Error)                    \
    X(hipHostUnregister, (void* memory), Error)                                                \
    X(hipGetErrorName, (Error error), const char*)                                             \
    X(hipGetErrorString, (Error error), const char*)                                           \
    X(hipGetLastError, (), Error)

struct Functions {
#define LITEATTENTION_DECLARE(name, parameters, result) result(*name) parameters = nullptr;
    LITEATTENTION_HIP_FUNCTIONS(LITEATTENTION_DECLARE)
#undef LITEATTENTION_DECLARE
};

// There is no usable HIP run-time; the text says what was tried and what to do.
class Unavailable : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

// A call of the HIP run-time failed; the text has the error's name.
class CallFailed : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

// An opened HIP run-time. Key: the file it came from. Owner: whoever opened it, shared with the
// devices made from it. Lifetime: the file itself stays loaded for good, because a HIP run-time
// has threads of its own and PyTorch may use it. Immutable, so any thread may call it.
class Library {
   public:
    // Opens `path`, or, if it is empty, the libamdhip64 that this process has loaded already
    // (PyTorch brings its own, and two of them in one process do not share streams), or else the
    // usual sonames. Throws Unavailable.
    static std::shared_ptr<const Library> Open(const std::string& path);

    const Functions& api() const { return api_; }
    const std::string& path() const { return path_; }
    // The software MI300X: device addresses are host addresses and launches are synchronous.
    bool emulated() const { return abi_version_ != nullptr; }

    // Throws CallFailed unless `error` is success. `what` names the call and its object;
    // `reported` says that the software MI300X has more to say on this very call.
    void Check(Error error, const std::string& what, bool reported = false) const;
    // Throws CallFailed: HIP sees no device.
    int DeviceCount() const;
    std::string Version() const;

   private:
    Library(void* handle, std::string path);

    Functions api_;
    std::string path_;
    int (*abi_version_)() = nullptr;
    const char* (*last_report_)() = nullptr;
};

}  // namespace liteattention::hip
