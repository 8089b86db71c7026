/* A HIP run-time that runs nothing and writes down every call, one line each.
 *
 * -DFAKE_EMULATOR   also exports what tells the software MI300X from a GPU
 * -DFAKE_OMIT_LAUNCH   leaves out two functions, as a library of another time would
 * It also offers what a launch must not call, so that such a call would be seen. */
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char calls[1 << 20];
static size_t used;
static char failing[64];
static int failure, devices = 1, units = 304, modules;
static __thread int current;
static void (*during_launches)(void);

static int note(const char* name, const char* format, ...) {
    int result = 0;
    pthread_mutex_lock(&lock);
    if (used + 4096 < sizeof calls) {
        used += (size_t)snprintf(calls + used, sizeof calls - used, "%s", name);
        va_list list;
        va_start(list, format);
        used += (size_t)vsnprintf(calls + used, sizeof calls - used, format, list);
        va_end(list);
        calls[used++] = '\n';
        calls[used] = 0;
    }
    if (failing[0] && strcmp(failing, name) == 0) result = failure;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT const char* fake_calls(void) { return calls; }
EXPORT void fake_reset(void) { used = 0, calls[0] = 0, failing[0] = 0, devices = 1, units = 304; }
EXPORT void fake_fail(const char* name, int error) {
    snprintf(failing, sizeof failing, "%s", name), failure = error;
}
EXPORT void fake_during_launches(void (*call)(void)) { during_launches = call; }
EXPORT void fake_devices(int count) { devices = count; }
EXPORT void fake_units(int count) { units = count; }

EXPORT int hipInit(unsigned flags) { return note("hipInit", " %u", flags); }
EXPORT int hipGetDeviceCount(int* count) {
    *count = devices;
    return note("hipGetDeviceCount", "");
}
EXPORT int hipGetDevice(int* device) {
    *device = current;
    return 0; /* asked around every launch: not worth a line */
}
EXPORT int hipSetDevice(int device) {
    current = device;
    return note("hipSetDevice", " %d", device);
}
EXPORT int hipDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 63 ? units : -1;
    return note("hipDeviceGetAttribute", " %d %d", attribute, device);
}
EXPORT int hipRuntimeGetVersion(int* version) {
    *version = 70253211;
    return note("hipRuntimeGetVersion", "");
}
EXPORT int hipModuleLoadData(void** module, const void* image) {
    const unsigned char* bytes = image;
    *module = (void*)(intptr_t)(100 + modules++);
    return note("hipModuleLoadData", " device=%d magic=%02x%c%c%c", current, bytes[0], bytes[1],
                bytes[2], bytes[3]);
}
EXPORT int hipModuleUnload(void* module) {
    (void)module;
    return note("hipModuleUnload", "");
}
#ifndef FAKE_OMIT_LAUNCH
static char names[256][64];
static int functions;

EXPORT int hipModuleGetFunction(void** function, void* module, const char* name) {
    (void)module;
    pthread_mutex_lock(&lock);
    snprintf(names[functions % 256], sizeof names[0], "%s", name);
    *function = names[functions++ % 256];
    pthread_mutex_unlock(&lock);
    return note("hipModuleGetFunction", " %s", name);
}
EXPORT int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned lds, void* stream,
                                 void** params, void** extra) {
    char hex[2048] = "";
    size_t size = 0;
    if (extra && extra[0] == (void*)1 && extra[2] == (void*)2 && extra[4] == (void*)3 && !params) {
        const unsigned char* bytes = extra[1];
        size = *(const size_t*)extra[3];
        for (size_t i = 0; i < size && i < 1000; i++) sprintf(hex + 2 * i, "%02x", bytes[i]);
    }
    int result =
        note("hipModuleLaunchKernel",
                " %s grid=%ux%ux%u block=%ux%ux%u lds=%u stream=%zu device=%d bytes=%zu %s",
                (char*)function, gx, gy, gz, bx, by, bz, lds, (size_t)stream, current, size, hex);
    if (during_launches) during_launches();
    return result;
}
#endif
EXPORT int hipHostRegister(void* memory, size_t bytes, unsigned flags) {
    return note("hipHostRegister", " %zu %zu %u", (size_t)memory, bytes, flags);
}
EXPORT int hipHostUnregister(void* memory) {
    return note("hipHostUnregister", " %zu", (size_t)memory);
}
EXPORT const char* hipGetErrorName(int error) {
    return error == 719 ? "hipErrorLaunchFailure" : error == 209 ? "hipErrorNoBinaryForGpu" : "?";
}
EXPORT const char* hipGetErrorString(int error) {
    return error == 719   ? "unspecified launch failure"
           : error == 209 ? "no kernel image is available for execution on the device"
                          : "?";
}
EXPORT int hipGetLastError(void) { return note("hipGetLastError", ""); }
EXPORT int hipDeviceSynchronize(void) { return note("hipDeviceSynchronize", ""); }
EXPORT int hipStreamSynchronize(void* s) { return note("hipStreamSynchronize", " %zu", (size_t)s); }
EXPORT int hipMalloc(void** p, size_t n) { return *p = 0, note("hipMalloc", " %zu", n); }
EXPORT int hipMemcpy(void* d, const void* s, size_t n, int k) {
    return (void)d, (void)s, note("hipMemcpy", " %zu %d", n, k);
}

#ifdef FAKE_EMULATOR
EXPORT int hipThreadExchangeStreamCaptureMode(int* mode) { return *mode = 0; }
EXPORT int lae_abi_version(void) { return 1; }
static void* stream;
static int capturing;
EXPORT void fake_stream(size_t handle, int captured) {
    stream = (void*)handle, capturing = captured;
}
EXPORT void* lae_current_stream(void) { return stream; }
EXPORT int lae_capturing(void* of) { return (void)of, capturing; }
EXPORT int lae_graph_touches(void* of, void* memory, size_t bytes) {
    return (void)of, note("lae_graph_touches", " %zu %zu", (size_t)memory, bytes);
}
static char graph_memory[1 << 20];
EXPORT int lae_graph_memory(void* of, size_t bytes, const void* contents, void** memory) {
    (void)of, (void)contents, *memory = graph_memory;
    return note("lae_graph_memory", " %zu", bytes);
}
EXPORT const char* lae_last_report(void) { return "LDS race: wave 3 reads dword 17 unordered"; }
#endif
