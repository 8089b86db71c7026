// The part of the HIP run-time that launches need, opened at run time: nothing links against ROCm.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

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
};

// What the software MI300X offers a host program whose tensors lie in plain memory: streams and
// graphs, which PyTorch has for a GPU's tensors only. X(name, parameters, result)
#define LITEATTENTION_EMULATOR_FUNCTIONS(X)                                  \
    X(hipThreadExchangeStreamCaptureMode, (int* mode), Error)                \
    X(lae_last_report, (), const char*)                                      \
    X(lae_current_stream, (), Stream)                                        \
    X(lae_capturing, (Stream stream), int)                                   \
    X(lae_graph_touches, (Stream stream, void* memory, size_t bytes), Error) \
    X(lae_graph_memory, (Stream stream, size_t bytes, const void* contents, void** memory), Error)

struct EmulatorFunctions {
    LITEATTENTION_EMULATOR_FUNCTIONS(LITEATTENTION_DECLARE)
};
#undef LITEATTENTION_DECLARE

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

// Which host memory the software MI300X may touch: the spans of all launches that are running.
// hipHostUnregister knows a span by its address alone and drops the newest, so two threads whose
// spans begin at one address would drop each other's. Here they are counted, and at each address
// the longest of those wanted stays registered. Another thread's capture does not concern them: on
// a GPU there is nothing to register. Key: the loaded run-time; owner: its Library
// objects, which share it; thread-safe.
class HostSpans {
   public:
    HostSpans(const Functions& api, const EmulatorFunctions& emulator)
        : register_(api.hipHostRegister),
          unregister_(api.hipHostUnregister),
          exchange_mode_(emulator.hipThreadExchangeStreamCaptureMode) {}
    // An error leaves nothing behind, so nothing is to be removed then.
    Error Add(void* begin, size_t bytes);
    void Remove(void* begin, size_t bytes);

   private:
    struct Spans {
        std::multiset<size_t> wanted;    // bytes
        std::vector<size_t> registered;  // ascending: the run-time drops the last one first
    };

    Error (*register_)(void*, size_t, unsigned);
    Error (*unregister_)(void*);
    Error (*exchange_mode_)(int*);
    std::mutex mutex_;
    std::map<void*, Spans> spans_;
};

// An opened HIP run-time. Key: the file it came from. Owner: whoever opened it, shared with the
// devices made from it. Lifetime: the file itself stays loaded for good, because a HIP run-time
// has threads of its own and PyTorch may use it. Immutable, so any thread may call it.
class Library {
   public:
    // Opens `path`, or, if it is empty, the libamdhip64 that PyTorch's libraries use (two of them
    // in one process do not share streams), or else the first that this process has loaded, or else
    // the usual sonames. Throws Unavailable.
    static std::shared_ptr<const Library> Open(const std::string& path);

    const Functions& api() const { return api_; }
    const std::string& path() const { return path_; }
    // The software MI300X: device addresses are host addresses and launches are synchronous.
    bool emulated() const { return emulated_; }

    // Of the software MI300X; a GPU needs none.
    HostSpans& host_spans() const { return *host_spans_; }
    // The stream that this thread's launches go to.
    Stream CurrentStream() const { return emulator_.lae_current_stream(); }
    // Whether launches on `stream` become part of a graph now.
    bool Capturing(Stream stream) const { return emulator_.lae_capturing(stream) != 0; }
    // The graph that `stream` is recording may touch these bytes whenever it is launched. The
    // caller keeps them for as long as it is.
    Error GraphTouches(Stream stream, void* memory, size_t bytes) const {
        return emulator_.lae_graph_touches(stream, memory, bytes);
    }
    // Memory that lives as long as the graph that `stream` is recording, undefined at each launch,
    // or constant with `contents`. Throws CallFailed.
    void* GraphMemory(Stream stream, size_t bytes, const void* contents) const;

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
    std::shared_ptr<HostSpans> host_spans_;
    bool emulated_ = false;
    EmulatorFunctions emulator_;  // null on a GPU
};

// Modules belong to a device and a null stream is the current device's: makes `device` current for
// this thread, and puts the thread's own back.
class CurrentDevice {
   public:
    CurrentDevice(const Library& library, int device) : library_(library) {
        library_.Check(library_.api().hipGetDevice(&previous_), "hipGetDevice");
        if (previous_ == device) return;
        library_.Check(library_.api().hipSetDevice(device),
                       "hipSetDevice(" + std::to_string(device) + ")");
        changed_ = true;
    }
    ~CurrentDevice() {
        if (changed_) library_.api().hipSetDevice(previous_);
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;

   private:
    const Library& library_;
    int previous_ = 0;
    bool changed_ = false;
};

}  // namespace liteattention::hip
