// HIP functions that describe the device, the run-time and its errors.
#include <cstring>
#include <map>

#include "abi/handles.h"

namespace emulator {

namespace {

constexpr int kComputeUnits = 304, kClockKHz = 2100000, kMemoryClockKHz = 1300000, kBusBits = 8192;
constexpr int kWarp = 64, kMaxThreads = 1024, kThreadsPerUnit = 2048;
constexpr int kRegisters = 131072, kL2 = 4 << 20, kVersion = 60400000;
constexpr int kMaxGrid[3] = {2147483647, 65536, 65536};
constexpr char kName[] = "AMD Instinct MI300X (emulated)", kArch[] = "gfx942:sramecc+:xnack-";

// By hipDeviceAttribute_t.
const std::map<int, int> kAttributes = {
    {0, 1},  // EccEnabled
    {3, 1},  // CanMapHostMemory
    {5, kClockKHz},
    {8, 1},  // ConcurrentKernels
    {19, kL2},
    {23, 9},  // ComputeCapabilityMajor
    {26, kMaxThreads},
    {27, kMaxThreads},
    {28, kMaxThreads},
    {29, kMaxGrid[0]},
    {30, kMaxGrid[1]},
    {31, kMaxGrid[2]},
    {56, kMaxThreads},
    {57, kThreadsPerUnit},
    {59, kBusBits},
    {60, kMemoryClockKHz},
    {61, 4},  // ComputeCapabilityMinor
    {63, kComputeUnits},
    {71, kRegisters},
    {72, kRegisters},
    {74, kLds},
    {75, kLds},
    {76, kLds},
    {85, 1},  // UnifiedAddressing
    {87, kWarp},
};

struct ErrorText {
    hipError_t error;
    const char *name, *text;
};
constexpr ErrorText kErrors[] = {
#define X(name, value, text) {name, #name, text},
    HIP_ERRORS(X)
#undef X
};

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
        // A known attribute of something that the device does not have is 0.
        if (attribute < 0 || attribute > 93) return hipErrorInvalidValue;
        const auto known = kAttributes.find(attribute);
        *value = known == kAttributes.end() ? 0 : known->second;
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
