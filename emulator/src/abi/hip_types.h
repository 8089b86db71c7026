// Errors and structures of HIP 6 and 7's hip_runtime_api.h.
#pragma once

#include <cstddef>

#define EXPORT extern "C" __attribute__((visibility("default")))

// X(name, value, text)
#define HIP_ERRORS(X)                                                                              \
    X(hipSuccess, 0, "no error")                                                                   \
    X(hipErrorInvalidValue, 1, "invalid argument")                                                 \
    X(hipErrorOutOfMemory, 2, "out of memory")                                                     \
    X(hipErrorInvalidConfiguration, 9, "invalid configuration argument")                           \
    X(hipErrorInvalidDevicePointer, 17, "invalid device pointer")                                  \
    X(hipErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                     \
    X(hipErrorInvalidDevice, 101, "invalid device ordinal")                                        \
    X(hipErrorInvalidImage, 200, "device kernel image is invalid")                                 \
    X(hipErrorNoBinaryForGpu, 209, "no kernel image is available for execution on the device")     \
    X(hipErrorInvalidHandle, 400, "invalid resource handle")                                       \
    X(hipErrorIllegalState, 401, "the operation cannot be performed in the present state")         \
    X(hipErrorNotFound, 500, "named symbol not found")                                             \
    X(hipErrorNotReady, 600, "device not ready")                                                   \
    X(hipErrorLaunchOutOfResources, 701, "out of resources")                                       \
    X(hipErrorHostMemoryNotRegistered, 713,                                                        \
      "pointer does not correspond to a registered memory region")                                 \
    X(hipErrorLaunchFailure, 719, "unspecified launch failure")                                    \
    X(hipErrorNotSupported, 801, "operation not supported")                                        \
    X(hipErrorStreamCaptureUnsupported, 900, "operation not permitted when stream is capturing")   \
    X(hipErrorStreamCaptureInvalidated, 901,                                                       \
      "operation failed due to a previous error during capture")                                   \
    X(hipErrorStreamCaptureMerge, 902,                                                             \
      "operation would result in a merge of separate capture sequences")                           \
    X(hipErrorStreamCaptureUnmatched, 903, "capture was not ended in the same stream as it began") \
    X(hipErrorStreamCaptureUnjoined, 904, "capturing stream has unjoined work")                    \
    X(hipErrorStreamCaptureIsolation, 905,                                                         \
      "dependency created on uncaptured work in another stream")                                   \
    X(hipErrorStreamCaptureImplicit, 906,                                                          \
      "operation would make the legacy stream depend on a capturing blocking stream")              \
    X(hipErrorCapturedEvent, 907,                                                                  \
      "operation not permitted on an event last recorded in a capturing stream")                   \
    X(hipErrorStreamCaptureWrongThread, 908,                                                       \
      "attempt to terminate a thread-local capture sequence from another thread")                  \
    X(hipErrorUnknown, 999, "unknown error")

using hipError_t = int;
enum : hipError_t {
#define X(name, value, text) name = value,
    HIP_ERRORS(X)
#undef X
};

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
