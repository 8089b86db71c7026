// HIP functions for memory. Device pointers are host pointers; copies and fills are done when the
// call returns.
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "abi/handles.h"

namespace emulator {

namespace {

// Bytes around an allocation that belong to nobody, so that a stray access is seen as such.
constexpr size_t kRedZone = 4096;
constexpr int kFill = 0xf5;

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

// The check and, where `copies`, the copy.
hipError_t copy_checked(void* to, const void* from, size_t bytes, int kind, bool copies = true) {
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
    if (copies) copy(to, from, bytes, from_device, to_device);
    return hipSuccess;
}

hipError_t check_copy(void* to, const void* from, size_t bytes, int kind) {
    return copy_checked(to, from, bytes, kind, false);
}

hipError_t check_fill(void* to, size_t bytes) {
    const bool known = bytes == 0 || (to && Device::get().memory.contains(address(to), bytes));
    return known ? hipSuccess : hipErrorInvalidValue;
}

hipError_t fill_checked(void* to, int value, size_t bytes) {
    const hipError_t error = check_fill(to, bytes);
    if (error || bytes == 0) return error;
    Memory& memory = Device::get().memory;
    std::memset(to, value, bytes);
    memory.mark_written(address(to), bytes);
    return hipSuccess;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

EXPORT hipError_t hipMalloc(void** pointer, size_t bytes) {
    return call([&]() -> hipError_t {
        if (!pointer) return hipErrorInvalidValue;
        *pointer = nullptr;
        if (const hipError_t error = refuse_unsafe("hipMalloc")) return error;
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
    return call([&]() -> hipError_t {
        if (const hipError_t error = refuse_unsafe("hipFree")) return error;
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
    return call([&] {
        const hipError_t error = refuse_synchronous("hipMemcpy");
        return error ? error : copy_checked(to, from, bytes, kind);
    });
}

EXPORT hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
    return call([&]() -> hipError_t {
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        if (const hipError_t error = check_copy(to, from, bytes, kind)) return error;
        return enqueue("hipMemcpyAsync", stream, {NodeType::kMemcpy, "hipMemcpyAsync", [=] {
                                                      return copy_checked(to, from, bytes, kind);
                                                  }});
    });
}

EXPORT hipError_t hipMemset(void* to, int value, size_t bytes) {
    return call([&] {
        const hipError_t error = refuse_synchronous("hipMemset");
        return error ? error : fill_checked(to, value, bytes);
    });
}

EXPORT hipError_t hipMemsetAsync(void* to, int value, size_t bytes, void* stream) {
    return call([&]() -> hipError_t {
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        if (const hipError_t error = check_fill(to, bytes)) return error;
        return enqueue("hipMemsetAsync", stream, {NodeType::kMemset, "hipMemsetAsync", [=] {
                                                      return fill_checked(to, value, bytes);
                                                  }});
    });
}

// Ranges may be registered more than once and overlap; each registration is undone by one call.
EXPORT hipError_t hipHostRegister(void* memory, size_t bytes, unsigned) {
    return call([&]() -> hipError_t {
        if (!memory || !bytes) return hipErrorInvalidValue;
        if (const hipError_t error = refuse_unsafe("hipHostRegister")) return error;
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
    return call([&]() -> hipError_t {
        if (const hipError_t error = refuse_unsafe("hipHostUnregister")) return error;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto [first, last] = handles.registered.equal_range(address(memory));
        if (first == last) return hipErrorHostMemoryNotRegistered;
        const auto newest = std::prev(last);
        Device::get().memory.remove(newest->first, newest->second);
        handles.registered.erase(newest);
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
