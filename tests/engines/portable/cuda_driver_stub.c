// What launches use of CUDA's driver, for tests without a GPU: it notes the last launch.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int CUresult;

static size_t sizes[256];
static size_t count;
static unsigned char record[1 << 14];
static size_t recorded;
static int context = 1;
static int error;
static int driver_version = 13000;

// Sizes of the parameters that each kernel has.
void stub_parameters(const size_t* given, size_t n) {
    memcpy(sizes, given, n * sizeof(size_t));
    count = n;
}
// What the last launch was given: grid, block, shared memory, stream, attributes, parameters.
size_t stub_take(unsigned char* out) {
    const size_t n = recorded;
    memcpy(out, record, n);
    recorded = 0;
    return n;
}
void stub_set_context(int current) { context = current; }
void stub_set_driver_version(int version) { driver_version = version; }
void stub_set_error(int result) { error = result; }

static void note(const void* from, size_t n) {
    memcpy(record + recorded, from, n);
    recorded += n;
}

typedef struct {
    unsigned id;
    char pad[4];
    int value;
    char rest[60];
} Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void* stream;
    Attribute* attributes;
    unsigned attribute_count;
} Config;

CUresult cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
    if (error) return error;
    recorded = 0;
    note(&function, sizeof(function));
    note(config, offsetof(Config, attributes));
    note(&config->attribute_count, sizeof(unsigned));
    for (unsigned i = 0; i < config->attribute_count; ++i) {
        note(&config->attributes[i].id, sizeof(unsigned));
        note(&config->attributes[i].value, sizeof(int));
    }
    for (size_t i = 0; i < count; ++i) note(parameters[i], sizes[i]);
    return extra ? 1 : 0;
}

CUresult cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
    if (index >= count) return 1;
    *offset = 0;
    *size = sizes[index];
    return 0;
}

// The map is a digest of everything that it is made from.
CUresult cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address,
                                const uint64_t* extents, const uint64_t* strides,
                                const uint32_t* box, const uint32_t* steps, int interleave,
                                int swizzle, int promotion, int fill) {
    // In the second word the bit that is taken out of maps of small tensors, see cuda_launch.cpp.
    uint64_t made[16] = {type, rank | 1u << 21, (uint64_t)address, interleave, swizzle, promotion,
                         fill};
    for (uint32_t i = 0; i < rank; ++i) {
        made[7] = made[7] * 1000003 + box[i] * 31 + steps[i];
        made[8 + i] = extents[i];
        made[12] = made[12] * 1000003 + (i + 1 < rank ? strides[i] : 0);
    }
    memcpy(map, made, 128);
    return 0;
}

CUresult cuCtxGetCurrent(void** current) {
    *current = context ? &context : 0;
    return 0;
}
CUresult cuGetErrorString(CUresult result, const char** text) {
    *text = result == 999 ? "a planted error" : "an error";
    return 0;
}

CUresult cuDriverGetVersion(int* version) {
    *version = driver_version;
    return 0;
}

#define UNUSED(name) \
    CUresult name(void) { return 1; }
UNUSED(cuCtxGetDevice)
UNUSED(cuCtxGetLimit)
UNUSED(cuCtxSetCurrent)
UNUSED(cuCtxSetLimit)
UNUSED(cuDeviceGet)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuDevicePrimaryCtxRetain)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveClusters)
UNUSED(cuPointerGetAttribute)
UNUSED(cuPointerGetAttributes)
UNUSED(cuStreamGetCaptureInfo)
UNUSED(cuStreamIsCapturing)
UNUSED(cuTensorMapEncodeIm2col)
