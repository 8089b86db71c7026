// HIP functions for streams and events. Everything is done when a call returns, so streams order
// themselves and synchronisation has nothing to wait for.
#include "abi/handles.h"

using namespace emulator;

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
