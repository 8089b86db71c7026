// HIP functions for streams and events. Everything is done when a call returns, so streams order
// themselves and synchronisation has nothing to wait for. Captures: hip_graph.cpp.
#include "abi/handles.h"

namespace emulator {

namespace {

constexpr unsigned kNonBlocking = 1;  // hipStreamNonBlocking

// Whether the host may wait for or ask about the event; `function` must return the error.
hipError_t refuse_event_wait(const char* function, void* event) {
    void* stream = nullptr;
    {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.events.find(event);
        if (found == handles.events.end()) return hipErrorInvalidHandle;
        stream = const_cast<void*>(found->second->captured);
        if (stream && !handles.streams.count(stream)) return hipErrorCapturedEvent;
    }
    if (!stream) return refuse_unsafe(function);
    refuse_wait(function, stream);
    return hipErrorCapturedEvent;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

EXPORT hipError_t hipStreamCreateWithFlags(void** stream, unsigned flags) {
    return call([&] {
        if (!stream || flags > kNonBlocking) return hipErrorInvalidValue;
        auto fresh = std::make_unique<Stream>();
        fresh->blocking = flags != kNonBlocking;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        *stream = fresh.get();
        handles.streams[*stream] = std::move(fresh);
        return hipSuccess;
    });
}

EXPORT hipError_t hipStreamCreate(void** stream) { return hipStreamCreateWithFlags(stream, 0); }

// A capture under way ends with it.
EXPORT hipError_t hipStreamDestroy(void* stream) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        return handles.streams.erase(stream) ? hipSuccess : hipErrorInvalidHandle;
    });
}

EXPORT hipError_t hipStreamSynchronize(void* stream) {
    return call([&]() -> hipError_t {
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        return refuse_wait("hipStreamSynchronize", stream);
    });
}

EXPORT hipError_t hipStreamQuery(void* stream) {
    return call([&]() -> hipError_t {
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        return refuse_wait("hipStreamQuery", stream);
    });
}

EXPORT hipError_t hipDeviceSynchronize() {
    return call([] { return refuse_device_wait("hipDeviceSynchronize"); });
}

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

// In a capture it marks a place in the graph and becomes no node.
EXPORT hipError_t hipEventRecord(void* event, void* stream) {
    return call([&]() -> hipError_t {
        Handles& handles = Handles::get();
        if (!handles.stream(stream)) return hipErrorInvalidHandle;
        if (const hipError_t error = refuse_legacy("hipEventRecord", stream)) return error;
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.events.find(event);
        if (found == handles.events.end()) return hipErrorInvalidHandle;
        const auto on = handles.streams.find(stream);
        if (on != handles.streams.end() && on->second->capture) {
            if (on->second->capture->invalid) return hipErrorStreamCaptureInvalidated;
            found->second->captured = stream;
            found->second->recorded = false;
            return hipSuccess;
        }
        found->second->captured = nullptr;
        found->second->recorded = true;
        found->second->time = std::chrono::steady_clock::now();
        return hipSuccess;
    });
}

EXPORT hipError_t hipEventSynchronize(void* event) {
    return call([&] { return refuse_event_wait("hipEventSynchronize", event); });
}

EXPORT hipError_t hipEventQuery(void* event) {
    return call([&] { return refuse_event_wait("hipEventQuery", event); });
}

// Host time between the records: how long the emulation took, no time of any GPU.
EXPORT hipError_t hipEventElapsedTime(float* milliseconds, void* begin, void* end) {
    return call([&] {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        if (!milliseconds) return hipErrorInvalidValue;
        const auto first = handles.events.find(begin), last = handles.events.find(end);
        if (first == handles.events.end() || last == handles.events.end())
            return hipErrorInvalidHandle;
        if (first->second->captured || last->second->captured) return hipErrorCapturedEvent;
        if (!first->second->recorded || !last->second->recorded) return hipErrorInvalidHandle;
        *milliseconds =
            std::chrono::duration<float, std::milli>(last->second->time - first->second->time)
                .count();
        return hipSuccess;
    });
}
