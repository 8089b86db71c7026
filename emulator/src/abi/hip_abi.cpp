// The HIP run-time functions that a host launcher needs, on the emulated device. Signatures, enum
// values and structure layouts are those of HIP 6 and 7's hip_runtime_api.h.
//
// Device pointers are host pointers. Launches, copies and fills are done when the call returns, so
// streams order themselves and synchronisation has nothing to wait for.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>

#include "abi/device.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

Device& Device::get() {
    static Device device;
    return device;
}

Latest& Device::latest() {
    thread_local Latest latest;
    return latest;
}

Options Device::options() const {
    Options options = Options::from_environment();
    const std::lock_guard lock(mutex_);
    for (const auto& [name, value] : set_) options.set(name, value);
    if (set_.count("check") && !set_.count("count") && !std::getenv("LITEATTENTION_EMULATOR_COUNT"))
        options.count = options.check;
    return options;
}

void Device::set_option(const std::string& name, const std::string& value) {
    Options().set(name, value.empty() ? (name == "check" || name == "count" ? "on"
                                         : name == "order"                  ? "round-robin"
                                         : name == "variant"                ? ""
                                                                            : "1")
                                      : value);
    const std::lock_guard lock(mutex_);
    if (value.empty())
        set_.erase(name);
    else
        set_[name] = value;
}

namespace {

using hipError_t = int;
enum : hipError_t {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidConfiguration = 9,
    hipErrorInvalidDevicePointer = 17,
    hipErrorInvalidMemcpyDirection = 21,
    hipErrorInvalidDevice = 101,
    hipErrorInvalidImage = 200,
    hipErrorNoBinaryForGpu = 209,
    hipErrorInvalidHandle = 400,
    hipErrorNotFound = 500,
    hipErrorNotReady = 600,
    hipErrorLaunchOutOfResources = 701,
    hipErrorHostMemoryNotRegistered = 713,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801,
    hipErrorUnknown = 999,
};

struct ErrorText {
    hipError_t error;
    const char *name, *text;
};
#define ERROR(name, text) {name, #name, text}
constexpr ErrorText kErrors[] = {
    ERROR(hipSuccess, "no error"),
    ERROR(hipErrorInvalidValue, "invalid argument"),
    ERROR(hipErrorOutOfMemory, "out of memory"),
    ERROR(hipErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR(hipErrorInvalidDevicePointer, "invalid device pointer"),
    ERROR(hipErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR(hipErrorInvalidDevice, "invalid device ordinal"),
    ERROR(hipErrorInvalidImage, "device kernel image is invalid"),
    ERROR(hipErrorNoBinaryForGpu, "no kernel image is available for execution on the device"),
    ERROR(hipErrorInvalidHandle, "invalid resource handle"),
    ERROR(hipErrorNotFound, "named symbol not found"),
    ERROR(hipErrorNotReady, "device not ready"),
    ERROR(hipErrorLaunchOutOfResources, "out of resources"),
    ERROR(hipErrorHostMemoryNotRegistered,
          "pointer does not correspond to a registered memory region"),
    ERROR(hipErrorLaunchFailure, "unspecified launch failure"),
    ERROR(hipErrorNotSupported, "operation not supported"),
    ERROR(hipErrorUnknown, "unknown error"),
};
#undef ERROR

constexpr int kComputeUnits = 304, kClockKHz = 2100000, kMemoryClockKHz = 1300000, kBusBits = 8192;
constexpr int kWarp = 64, kMaxThreads = 1024, kThreadsPerUnit = 2048, kLds = 65536;
constexpr int kRegisters = 131072, kL2 = 4 << 20, kVersion = 60400000;
constexpr size_t kGlobalMemory = size_t{192} << 30;
constexpr int kMaxGrid[3] = {2147483647, 65536, 65536};
constexpr char kName[] = "AMD Instinct MI300X (emulated)", kArch[] = "gfx942:sramecc+:xnack-";

// Bytes around an allocation that belong to nobody, so that a stray access is seen as such.
constexpr size_t kRedZone = 4096;
constexpr int kFill = 0xf5;

struct hipDeviceProp_tR0600 {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3], clockRate;
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
    int deviceOverlap, multiProcessorCount, kernelExecTimeoutEnabled, integrated, canMapHostMemory,
        computeMode;
    int textures[40];  // maxTexture1D to maxSurfaceCubemapLayered: no image instructions on gfx942
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver,
        asyncEngineCount, unifiedAddressing, memoryClockRate, memoryBusWidth, l2CacheSize,
        persistingL2CacheMaxSize, maxThreadsPerMultiProcessor, streamPrioritiesSupported,
        globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID,
        hostNativeAtomicSupported, singleToDoublePrecisionPerfRatio, pageableMemoryAccess,
        concurrentManagedAccess, computePreemptionSupported, canUseHostPointerForRegisteredMem,
        cooperativeLaunch, cooperativeMultiDeviceLaunch;
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost,
        maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported, sparseHipArraySupported, hostRegisterReadOnlySupported,
        timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
    unsigned gpuDirectRDMAFlushWritesOptions;
    int gpuDirectRDMAWritesOrdering;
    unsigned memoryPoolSupportedHandleTypes;
    int deferredMappingHipArraySupported, ipcEventSupported, clusterLaunch, unifiedFunctionPointers;
    int reserved[63], hipReserved[32];
    char gcnArchName[256];
    size_t maxSharedMemoryPerMultiProcessor;
    int clockInstructionRate;
    unsigned arch;  // hipDeviceArch_t bits
    unsigned *hdpMemFlushCntl, *hdpRegFlushCntl;
    int cooperativeMultiDeviceUnmatchedFunc, cooperativeMultiDeviceUnmatchedGridDim,
        cooperativeMultiDeviceUnmatchedBlockDim, cooperativeMultiDeviceUnmatchedSharedMem,
        isLargeBar, asicRevision;
};
// Offsets that programs built against HIP's header use.
static_assert(offsetof(hipDeviceProp_tR0600, totalGlobalMem) == 288);
static_assert(offsetof(hipDeviceProp_tR0600, warpSize) == 308);
static_assert(offsetof(hipDeviceProp_tR0600, multiProcessorCount) == 388);
static_assert(offsetof(hipDeviceProp_tR0600, gcnArchName) == 1160);
static_assert(sizeof(hipDeviceProp_tR0600) == 1472);

struct hipPointerAttribute_t {
    int type, device;
    void *devicePointer, *hostPointer;
    int isManaged;
    unsigned allocationFlags;
};

struct Function {
    std::shared_ptr<const Module> module;
    const Kernel* kernel;
};

struct Stream {};
struct Event {
    bool recorded = false;
    std::chrono::steady_clock::time_point time;
};

// Objects behind handles. Key: the process; thread-safe under its mutex.
struct Handles {
    struct Loaded {
        std::shared_ptr<const Module> module;
        std::map<std::string, std::unique_ptr<Function>> functions;
    };
    std::mutex mutex;
    std::map<const void*, Loaded> modules;
    std::map<const void*, Function*> functions;
    std::map<uint64_t, std::pair<void*, size_t>> allocations;  // begin -> block, bytes
    std::multimap<uint64_t, size_t> registered;
    std::map<const void*, std::unique_ptr<Stream>> streams;
    std::map<const void*, std::unique_ptr<Event>> events;

    ~Handles() {
        for (auto& [begin, allocation] : allocations) std::free(allocation.first);
    }
    static Handles& get() {
        static Handles handles;
        return handles;
    }
    bool stream(const void* handle) {  // null and the two tagged default streams are always there
        const auto value = reinterpret_cast<uintptr_t>(handle);
        if (value <= 2) return true;
        const std::lock_guard lock(mutex);
        return streams.count(handle) != 0;
    }
};

hipError_t& last_error() {
    thread_local hipError_t error = hipSuccess;
    return error;
}

// Remembers an error for hipGetLastError and keeps exceptions from leaving C functions.
template <typename Body>
hipError_t call(Body body) {
    hipError_t error;
    try {
        error = body();
    } catch (const WrongTarget& problem) {
        Device::latest().text = problem.what();
        error = hipErrorNoBinaryForGpu;
    } catch (const BadCodeObject& problem) {
        Device::latest().text = problem.what();
        error = hipErrorInvalidImage;
    } catch (const std::invalid_argument& problem) {
        Device::latest().text = problem.what();
        error = hipErrorInvalidValue;
    } catch (const std::bad_alloc&) {
        error = hipErrorOutOfMemory;
    } catch (const std::exception& problem) {
        Device::latest().text = problem.what();
        error = hipErrorUnknown;
    }
    if (error != hipSuccess) last_error() = error;
    return error;
}

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// Bytes keep their written-ness when the device copies them.
void copy(void* to, const void* from, size_t bytes, bool from_device, bool to_device) {
    Memory& memory = Device::get().memory;
    std::memmove(to, from, bytes);
    if (!to_device) return;
    if (!from_device || memory.written(address(from), bytes)) {
        memory.mark_written(address(to), bytes);
        return;
    }
    for (size_t i = 0; i < bytes; ++i) {
        if (memory.written(address(from) + i, 1))
            memory.mark_written(address(to) + i, 1);
        else
            memory.mark_unwritten(address(to) + i, 1);
    }
}

hipError_t copy_checked(void* to, const void* from, size_t bytes, int kind) {
    if (bytes == 0) return hipSuccess;
    if (!to || !from) return hipErrorInvalidValue;
    if (kind < 0 || kind > 4) return hipErrorInvalidMemcpyDirection;
    Memory& memory = Device::get().memory;
    const bool from_known = memory.extent(address(from)) != 0;
    const bool to_known = memory.extent(address(to)) != 0;
    const bool from_device = kind == 4 ? from_known : kind == 2 || kind == 3;
    const bool to_device = kind == 4 ? to_known : kind == 1 || kind == 3;
    if (from_device && !memory.contains(address(from), bytes)) return hipErrorInvalidValue;
    if (to_device && !memory.contains(address(to), bytes)) return hipErrorInvalidValue;
    copy(to, from, bytes, from_device, to_device);
    return hipSuccess;
}

hipError_t fill_checked(void* to, int value, size_t bytes) {
    if (bytes == 0) return hipSuccess;
    Memory& memory = Device::get().memory;
    if (!to || !memory.contains(address(to), bytes)) return hipErrorInvalidValue;
    std::memset(to, value, bytes);
    memory.mark_written(address(to), bytes);
    return hipSuccess;
}

// Lays out the explicit arguments. Returns what is wrong with them, "" when nothing is.
std::string gather(const Kernel& kernel, void** params, void** extra,
                   std::vector<uint8_t>& arguments) {
    if (extra) {
        const void* buffer = nullptr;
        const size_t* bytes = nullptr;
        for (void** item = extra; *item != reinterpret_cast<void*>(3); item += 2) {
            if (item[0] == reinterpret_cast<void*>(1))
                buffer = item[1];
            else if (item[0] == reinterpret_cast<void*>(2))
                bytes = static_cast<size_t*>(item[1]);
            else
                return "the list of launch parameters has a key that is neither buffer nor size";
        }
        if (!bytes || (!buffer && *bytes))
            return "the list of launch parameters lacks the buffer or its size";
        // A run-time copies what the metadata declares: of a shorter buffer, what lies behind it.
        // What a longer one has more never reaches the kernel.
        for (const Argument& argument : kernel.arguments)
            if (!argument.hidden() && uint64_t{argument.offset} + argument.size > *bytes)
                return "the argument buffer has " + std::to_string(*bytes) +
                       " bytes, the kernel's metadata declares " +
                       std::to_string(kernel.explicit_bytes()) + ": argument '" + argument.name +
                       "' takes bytes " + std::to_string(argument.offset) + " to " +
                       std::to_string(argument.offset + argument.size);
        const auto* data = static_cast<const uint8_t*>(buffer);
        arguments.assign(data, data + std::min<size_t>(*bytes, kernel.kernarg_bytes));
        return "";
    }
    if (!params)
        return kernel.explicit_bytes() ? "no arguments were passed, the kernel takes some" : "";
    if (kernel.arguments.empty() && kernel.kernarg_bytes)
        return "the metadata does not say which arguments there are: pass them as a buffer";
    arguments.assign(kernel.explicit_bytes(), 0);
    for (const Argument& argument : kernel.arguments) {
        if (argument.hidden()) continue;
        if (!*params) return "argument '" + argument.name + "' is missing";
        std::memcpy(arguments.data() + argument.offset, *params++, argument.size);
    }
    return "";
}

}  // namespace
}  // namespace emulator

using namespace emulator;

EXPORT int lae_abi_version() { return 1; }

EXPORT const char* lae_last_report() { return Device::latest().text.c_str(); }

EXPORT hipError_t hipInit(unsigned flags) {
    return call([&] { return flags ? hipErrorInvalidValue : hipSuccess; });
}

EXPORT hipError_t hipGetDeviceCount(int* count) {
    return call([&] {
        if (!count) return hipErrorInvalidValue;
        *count = 1;
        return hipSuccess;
    });
}

EXPORT hipError_t hipGetDevice(int* device) {
    return call([&] {
        if (!device) return hipErrorInvalidValue;
        *device = 0;
        return hipSuccess;
    });
}

EXPORT hipError_t hipSetDevice(int device) {
    return call([&] { return device ? hipErrorInvalidDevice : hipSuccess; });
}

EXPORT hipError_t hipDeviceGetAttribute(int* value, int attribute, int device) {
    return call([&] {
        if (!value) return hipErrorInvalidValue;
        if (device) return hipErrorInvalidDevice;
        switch (attribute) {
            case 3:
                *value = 1;
                break;  // CanMapHostMemory
            case 5:
                *value = kClockKHz;
                break;
            case 19:
                *value = kL2;
                break;
            case 23:
                *value = 9;
                break;  // ComputeCapabilityMajor
            case 26:
            case 27:
            case 28:
                *value = kMaxThreads;
                break;
            case 29:
            case 30:
            case 31:
                *value = kMaxGrid[attribute - 29];
                break;
            case 56:
                *value = kMaxThreads;
                break;
            case 57:
                *value = kThreadsPerUnit;
                break;
            case 59:
                *value = kBusBits;
                break;
            case 60:
                *value = kMemoryClockKHz;
                break;
            case 61:
                *value = 4;
                break;  // ComputeCapabilityMinor
            case 63:
                *value = kComputeUnits;
                break;
            case 71:
            case 72:
                *value = kRegisters;
                break;
            case 74:
            case 75:
            case 76:
                *value = kLds;
                break;
            case 85:
                *value = 1;
                break;  // UnifiedAddressing
            case 87:
                *value = kWarp;
                break;
            case 0:
            case 8:
                *value = 1;
                break;  // EccEnabled, ConcurrentKernels
            default:
                // A known attribute of something that the device does not have.
                if (attribute < 0 || attribute > 93) return hipErrorInvalidValue;
                *value = 0;
        }
        return hipSuccess;
    });
}

EXPORT hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
    return call([&] {
        if (!properties) return hipErrorInvalidValue;
        if (device) return hipErrorInvalidDevice;
        hipDeviceProp_tR0600 out{};
        std::memcpy(out.name, kName, sizeof kName);
        std::memcpy(out.gcnArchName, kArch, sizeof kArch);
        out.totalGlobalMem = kGlobalMemory;
        out.sharedMemPerBlock = out.sharedMemPerMultiprocessor = out.sharedMemPerBlockOptin = kLds;
        out.maxSharedMemoryPerMultiProcessor = kLds;
        out.regsPerBlock = out.regsPerMultiprocessor = kRegisters;
        out.warpSize = kWarp;
        out.memPitch = 2147483647;
        out.maxThreadsPerBlock = kMaxThreads;
        for (int i = 0; i < 3; ++i)
            out.maxThreadsDim[i] = kMaxThreads, out.maxGridSize[i] = kMaxGrid[i];
        out.clockRate = kClockKHz;
        out.totalConstMem = 2147483647;
        out.major = 9;
        out.minor = 4;
        out.textureAlignment = out.texturePitchAlignment = 256;
        out.multiProcessorCount = kComputeUnits;
        out.canMapHostMemory = out.concurrentKernels = out.ECCEnabled = out.unifiedAddressing = 1;
        out.hostRegisterSupported = out.canUseHostPointerForRegisteredMem = out.isLargeBar = 1;
        out.memoryClockRate = kMemoryClockKHz;
        out.memoryBusWidth = kBusBits;
        out.l2CacheSize = kL2;
        out.maxThreadsPerMultiProcessor = kThreadsPerUnit;
        out.maxBlocksPerMultiProcessor = kThreadsPerUnit / kWarp;
        out.clockInstructionRate = 100000;
        *properties = out;
        return hipSuccess;
    });
}

EXPORT hipError_t hipRuntimeGetVersion(int* version) {
    return call([&] {
        if (!version) return hipErrorInvalidValue;
        *version = kVersion;
        return hipSuccess;
    });
}

EXPORT hipError_t hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }

EXPORT hipError_t hipModuleLoadData(void** module, const void* image) {
    return call([&] {
        if (!module || !image) return hipErrorInvalidValue;
        auto loaded = std::make_shared<const Module>(image, 0, Device::get().options());
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const void* handle = loaded.get();
        handles.modules[handle].module = std::move(loaded);
        *module = const_cast<void*>(handle);
        return hipSuccess;
    });
}

EXPORT hipError_t hipModuleUnload(void* module) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.modules.find(module);
        if (found == handles.modules.end()) return hipErrorInvalidHandle;
        for (const auto& [name, function] : found->second.functions)
            handles.functions.erase(function.get());
        handles.modules.erase(found);
        return hipSuccess;
    });
}

EXPORT hipError_t hipModuleGetFunction(void** function, void* module, const char* name) {
    return call([&] {
        if (!function || !name) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.modules.find(module);
        if (found == handles.modules.end()) return hipErrorInvalidHandle;
        const Kernel* kernel = found->second.module->object.kernel(name);
        if (!kernel) return hipErrorNotFound;
        std::unique_ptr<Function>& slot = found->second.functions[name];
        if (!slot) {
            slot = std::make_unique<Function>(Function{found->second.module, kernel});
            handles.functions[slot.get()] = slot.get();
        }
        *function = slot.get();
        return hipSuccess;
    });
}

EXPORT hipError_t hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y,
                                        unsigned grid_z, unsigned block_x, unsigned block_y,
                                        unsigned block_z, unsigned lds_bytes, void* stream,
                                        void** params, void** extra) {
    return call([&] {
        Latest& latest = Device::latest();
        latest = Latest{};
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        {
            Handles& handles = Handles::get();
            const std::lock_guard lock(handles.mutex);
            const auto found = handles.functions.find(function);
            if (found == handles.functions.end()) return hipErrorInvalidHandle;
            latest.module = found->second->module;  // an unload in another thread must wait for us
            latest.kernel = found->second->kernel;
        }
        if (params && extra) return hipErrorInvalidValue;
        Launch launch{&latest.module->object,      latest.kernel, {grid_x, grid_y, grid_z},
                      {block_x, block_y, block_z}, lds_bytes,     {}};
        const std::string wrong = gather(*latest.kernel, params, extra, launch.arguments);
        if (!wrong.empty()) {
            latest.text = latest.kernel->name + ": " + wrong + "\n";
            return hipErrorInvalidValue;
        }
        latest.text = objections(launch);
        if (!latest.text.empty()) {
            if (!latest.kernel->unimplemented.empty()) return hipErrorNotSupported;
            if (latest.kernel->lds_bytes + uint64_t{lds_bytes} > kLds)
                return hipErrorLaunchOutOfResources;
            return hipErrorInvalidConfiguration;
        }
        latest.report = std::make_unique<Report>();
        run(launch, Device::get().memory, Device::get().options(), *latest.report);
        latest.text = latest.report->text(latest.module->object, *latest.kernel);
        return latest.text.empty() ? hipSuccess : hipErrorLaunchFailure;
    });
}

EXPORT hipError_t hipFuncGetAttribute(int* value, int attribute, const void* function) {
    return call([&] {
        if (!value) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.functions.find(function);
        if (found == handles.functions.end()) return hipErrorInvalidHandle;
        const Kernel& kernel = *found->second->kernel;
        switch (attribute) {
            case 0:
                *value = static_cast<int>(kernel.max_workgroup);
                break;
            case 1:
                *value = static_cast<int>(kernel.lds_bytes);
                break;
            case 2:
                *value = 0;
                break;
            case 3:
                *value = static_cast<int>(kernel.scratch_bytes);
                break;
            case 4:
                *value = static_cast<int>(kernel.vgprs);
                break;
            case 5:
            case 6:
                *value = 94;
                break;
            case 7:
            case 9:
                *value = 0;
                break;
            case 8:
                *value = kLds - static_cast<int>(kernel.lds_bytes);
                break;
            default:
                return hipErrorInvalidValue;
        }
        return hipSuccess;
    });
}

EXPORT hipError_t hipMalloc(void** pointer, size_t bytes) {
    return call([&] {
        if (!pointer) return hipErrorInvalidValue;
        *pointer = nullptr;
        if (bytes == 0) return hipSuccess;
        if (bytes > kGlobalMemory) return hipErrorOutOfMemory;
        const size_t block_bytes = (bytes + 2 * kRedZone + kRedZone - 1) / kRedZone * kRedZone;
        auto* block = static_cast<uint8_t*>(std::aligned_alloc(kRedZone, block_bytes));
        if (!block) return hipErrorOutOfMemory;
        std::memset(block, kFill, block_bytes);
        uint8_t* begin = block + kRedZone;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        handles.allocations[address(begin)] = {block, bytes};
        Device::get().memory.add(address(begin), bytes, {.tracked = true});
        *pointer = begin;
        return hipSuccess;
    });
}

EXPORT hipError_t hipFree(void* pointer) {
    return call([&] {
        if (!pointer) return hipSuccess;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.allocations.find(address(pointer));
        if (found == handles.allocations.end()) return hipErrorInvalidValue;
        Device::get().memory.remove(found->first);
        std::free(found->second.first);
        handles.allocations.erase(found);
        return hipSuccess;
    });
}

EXPORT hipError_t hipMemcpy(void* to, const void* from, size_t bytes, int kind) {
    return call([&] { return copy_checked(to, from, bytes, kind); });
}

EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    return call([&] {
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        return static_cast<decltype(hipErrorInvalidHandle)>(copy_checked(to, from, bytes, kind));
    });
}

EXPORT hipError_t hipMemset(void* to, int value, size_t bytes) {
    return call([&] { return fill_checked(to, value, bytes); });
}

EXPORT hipError_t hipMemsetAsync(void* to, int value, size_t bytes, void* stream) {
    return call([&]() -> hipError_t {
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        return fill_checked(to, value, bytes);
    });
}

EXPORT hipError_t hipStreamCreate(void** stream) {
    return call([&] {
        if (!stream) return hipErrorInvalidValue;
        auto fresh = std::make_unique<Stream>();
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        *stream = fresh.get();
        handles.streams[*stream] = std::move(fresh);
        return hipSuccess;
    });
}

EXPORT hipError_t hipStreamDestroy(void* stream) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        return handles.streams.erase(stream) ? hipSuccess : hipErrorInvalidHandle;
    });
}

EXPORT hipError_t hipStreamSynchronize(void* stream) {
    return call([&] { return Handles::get().stream(stream) ? hipSuccess : hipErrorInvalidHandle; });
}

EXPORT hipError_t hipDeviceSynchronize() { return hipSuccess; }

EXPORT hipError_t hipEventCreate(void** event) {
    return call([&] {
        if (!event) return hipErrorInvalidValue;
        auto fresh = std::make_unique<Event>();
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        *event = fresh.get();
        handles.events[*event] = std::move(fresh);
        return hipSuccess;
    });
}

EXPORT hipError_t hipEventDestroy(void* event) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        return handles.events.erase(event) ? hipSuccess : hipErrorInvalidHandle;
    });
}

EXPORT hipError_t hipEventRecord(void* event, void* stream) {
    return call([&] {
        Handles& handles = Handles::get();
        if (!handles.stream(stream)) return hipErrorInvalidHandle;
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.events.find(event);
        if (found == handles.events.end()) return hipErrorInvalidHandle;
        found->second->recorded = true;
        found->second->time = std::chrono::steady_clock::now();
        return hipSuccess;
    });
}

EXPORT hipError_t hipEventSynchronize(void* event) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        return handles.events.count(event) ? hipSuccess : hipErrorInvalidHandle;
    });
}

// Host time between the records: how long the emulation took, no time of any GPU.
EXPORT hipError_t hipEventElapsedTime(float* milliseconds, void* begin, void* end) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        if (!milliseconds) return hipErrorInvalidValue;
        const auto first = handles.events.find(begin), last = handles.events.find(end);
        if (first == handles.events.end() || last == handles.events.end() ||
            !first->second->recorded || !last->second->recorded)
            return hipErrorInvalidHandle;
        *milliseconds =
            std::chrono::duration<float, std::milli>(last->second->time - first->second->time)
                .count();
        return hipSuccess;
    });
}

// Ranges may be registered more than once and overlap; each registration is undone by one call.
EXPORT hipError_t hipHostRegister(void* memory, size_t bytes, unsigned) {
    return call([&] {
        if (!memory || !bytes) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        auto after = handles.allocations.upper_bound(address(memory));
        if (after != handles.allocations.begin()) {
            const auto& [begin, allocation] = *std::prev(after);
            if (address(memory) < begin + allocation.second) return hipErrorInvalidValue;
        }
        Device::get().memory.add(address(memory), bytes, {});
        handles.registered.emplace(address(memory), bytes);
        return hipSuccess;
    });
}

EXPORT hipError_t hipHostUnregister(void* memory) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.registered.find(address(memory));
        if (found == handles.registered.end()) return hipErrorHostMemoryNotRegistered;
        handles.registered.erase(found);
        Device::get().memory.remove(address(memory));
        return hipSuccess;
    });
}

EXPORT hipError_t hipHostGetDevicePointer(void** device, void* host, unsigned flags) {
    return call([&] {
        if (!device || !host || flags) return hipErrorInvalidValue;
        if (!Device::get().memory.extent(address(host))) return hipErrorInvalidValue;
        *device = host;
        return hipSuccess;
    });
}

EXPORT hipError_t hipPointerGetAttributes(hipPointerAttribute_t* attributes, const void* pointer) {
    return call([&] {
        if (!attributes || !pointer) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        void* const at = const_cast<void*>(pointer);
        auto after = handles.allocations.upper_bound(address(pointer));
        const bool allocated =
            after != handles.allocations.begin() &&
            address(pointer) < std::prev(after)->first + std::prev(after)->second.second;
        bool registered = false;
        for (const auto& [begin, bytes] : handles.registered)
            registered |= address(pointer) >= begin && address(pointer) - begin < bytes;
        // hipMemoryTypeUnregistered 0, Host 1, Device 2.
        if (allocated)
            *attributes = {2, 0, at, nullptr, 0, 0};
        else if (registered)
            *attributes = {1, 0, at, at, 0, 0};
        else
            *attributes = {0, -1, nullptr, at, 0, 0};
        return hipSuccess;
    });
}

EXPORT const char* hipGetErrorName(hipError_t error) {
    for (const ErrorText& known : kErrors)
        if (known.error == error) return known.name;
    return "hipErrorUnknown";
}

EXPORT const char* hipGetErrorString(hipError_t error) {
    for (const ErrorText& known : kErrors)
        if (known.error == error) return known.text;
    return "unknown error";
}

EXPORT hipError_t hipGetLastError() {
    const hipError_t error = last_error();
    last_error() = hipSuccess;
    return error;
}
