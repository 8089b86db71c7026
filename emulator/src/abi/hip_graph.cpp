// HIP functions for stream capture and graphs, and how host programs that keep tensors in plain
// memory take part. A graph's launch is done when the call returns. One stream per capture: there
// is no hipStreamWaitEvent, so nothing forks.
#include <algorithm>

#include "abi/handles.h"

namespace emulator {

namespace {

using HostFunction = void (*)(void*);

// Of hipGraphInstantiateWithFlags: AutoFreeOnLaunch, Upload, UseNodePriority. None changes anything
// here.
constexpr unsigned long long kInstantiateFlags = 1 | 2 | 8;

// The stream behind a handle, under the mutex; null for the default ones and for no stream.
Stream* find_stream(Handles& handles, const void* handle) {
    const auto found = handles.streams.find(handle);
    return found == handles.streams.end() ? nullptr : found->second.get();
}

// That of the calling thread; see lae_set_current_stream.
void*& current_stream() {
    thread_local void* stream = nullptr;
    return stream;
}

CaptureStatus status_of(const Stream* stream) {
    if (!stream || !stream->capture) return CaptureStatus::kNone;
    return stream->capture->invalid ? CaptureStatus::kInvalidated : CaptureStatus::kActive;
}

// Asks without invalidating anything.
hipError_t capture_info(void* handle, int* status, unsigned long long* id, void** graph,
                        const void* const** dependencies, size_t* count) {
    if (!status) return hipErrorInvalidValue;
    Handles& handles = Handles::get();
    if (!handles.stream(handle)) return hipErrorInvalidHandle;
    const std::lock_guard lock(handles.mutex);
    if (is_legacy(handle))
        for (const auto& [other, stream] : handles.streams)
            if (stream->blocking && status_of(stream.get()) == CaptureStatus::kActive)
                return hipErrorStreamCaptureImplicit;
    const Stream* const stream = find_stream(handles, handle);
    const CaptureStatus found = status_of(stream);
    *status = static_cast<int>(found);
    if (found != CaptureStatus::kActive) return hipSuccess;
    const Capture& capture = *stream->capture;
    if (id) *id = capture.id;
    if (graph) *graph = capture.graph.get();
    if (dependencies) *dependencies = &capture.last;
    if (count) *count = capture.last ? 1 : 0;
    return hipSuccess;
}

// Under the mutex.
const Node* find_node(const Handles& handles, const void* node) {
    for (const auto& [handle, graph] : handles.graphs)
        for (const auto& own : graph->nodes)
            if (own.get() == node) return own.get();
    return nullptr;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

EXPORT hipError_t hipStreamBeginCapture(void* stream, int mode) {
    return call([&] {
        Handles& handles = Handles::get();
        if (!handles.stream(stream)) return hipErrorInvalidHandle;
        if (is_legacy(stream)) return hipErrorStreamCaptureUnsupported;
        if (mode < 0 || mode > static_cast<int>(CaptureMode::kRelaxed)) return hipErrorInvalidValue;
        const std::lock_guard lock(handles.mutex);
        Stream* const found = find_stream(handles, stream);
        if (!found) return hipErrorNotSupported;  // the per-thread default stream
        if (found->capture) return hipErrorIllegalState;
        found->capture = std::make_unique<Capture>();
        found->capture->mode = static_cast<CaptureMode>(mode);
        found->capture->thread = std::this_thread::get_id();
        found->capture->id = ++handles.captures;
        return hipSuccess;
    });
}

EXPORT hipError_t hipStreamEndCapture(void* stream, void** graph) {
    return call([&] {
        if (!graph) return hipErrorInvalidValue;
        *graph = nullptr;
        Handles& handles = Handles::get();
        if (!handles.stream(stream)) return hipErrorInvalidHandle;
        std::unique_ptr<Capture> ended;  // freed without the mutex
        const std::lock_guard lock(handles.mutex);
        Stream* const found = find_stream(handles, stream);
        if (!found || !found->capture) return hipErrorIllegalState;
        if (found->capture->mode != CaptureMode::kRelaxed &&
            found->capture->thread != std::this_thread::get_id())
            return hipErrorStreamCaptureWrongThread;
        ended = std::move(found->capture);
        if (ended->invalid) {
            Device::latest().text = ended->reason + "\n";
            return hipErrorStreamCaptureInvalidated;
        }
        *graph = ended->graph.get();
        handles.graphs[*graph] = std::move(ended->graph);
        return hipSuccess;
    });
}

EXPORT hipError_t hipStreamIsCapturing(void* stream, int* status) {
    return call([&] { return capture_info(stream, status, nullptr, nullptr, nullptr, nullptr); });
}

EXPORT hipError_t hipStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) {
    return call([&] { return capture_info(stream, status, id, nullptr, nullptr, nullptr); });
}

EXPORT hipError_t hipStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id,
                                             void** graph, const void* const** dependencies,
                                             size_t* count) {
    return call([&] { return capture_info(stream, status, id, graph, dependencies, count); });
}

EXPORT hipError_t hipThreadExchangeStreamCaptureMode(int* mode) {
    return call([&] {
        if (!mode || *mode < 0 || *mode > static_cast<int>(CaptureMode::kRelaxed))
            return hipErrorInvalidValue;
        const auto wanted = static_cast<CaptureMode>(*mode);
        *mode = static_cast<int>(std::exchange(thread_capture_mode(), wanted));
        return hipSuccess;
    });
}

// `function` must not call HIP.
EXPORT hipError_t hipLaunchHostFunc(void* stream, HostFunction function, void* data) {
    return call([&]() -> hipError_t {
        if (!function) return hipErrorInvalidValue;
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        return enqueue("hipLaunchHostFunc", stream,
                       {NodeType::kHost, "hipLaunchHostFunc", [=]() -> hipError_t {
                            function(data);
                            return hipSuccess;
                        }});
    });
}

EXPORT hipError_t hipGraphGetNodes(void* graph, const void** nodes, size_t* count) {
    return call([&] {
        if (!graph || !count) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.graphs.find(graph);
        if (found == handles.graphs.end()) return hipErrorInvalidValue;
        const auto& all = found->second->nodes;
        if (!nodes) {
            *count = all.size();
            return hipSuccess;
        }
        for (size_t i = 0; i < *count; ++i) nodes[i] = i < all.size() ? all[i].get() : nullptr;
        *count = std::min(*count, all.size());
        return hipSuccess;
    });
}

EXPORT hipError_t hipGraphNodeGetType(void* node, int* type) {
    return call([&] {
        if (!node || !type) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const Node* const found = find_node(handles, node);
        if (!found) return hipErrorInvalidValue;
        *type = static_cast<int>(found->type);
        return hipSuccess;
    });
}

EXPORT hipError_t hipGraphInstantiateWithFlags(void** executable, void* graph,
                                               unsigned long long flags) {
    return call([&] {
        if (!executable || !graph || flags & ~kInstantiateFlags) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.graphs.find(graph);
        if (found == handles.graphs.end()) return hipErrorInvalidValue;
        auto made = std::make_shared<const Graph>(*found->second);
        *executable = const_cast<Graph*>(made.get());
        handles.executables[*executable] = std::move(made);
        return hipSuccess;
    });
}

EXPORT hipError_t hipGraphInstantiate(void** executable, void* graph, void** bad_node, char* log,
                                      size_t log_bytes) {
    if (bad_node) *bad_node = nullptr;
    if (log && log_bytes) *log = '\0';
    return hipGraphInstantiateWithFlags(executable, graph, 0);
}

EXPORT hipError_t hipGraphLaunch(void* executable, void* stream) {
    return call([&]() -> hipError_t {
        Handles& handles = Handles::get();
        if (!handles.stream(stream)) return hipErrorInvalidHandle;
        std::shared_ptr<const Graph> graph;
        {
            const std::lock_guard lock(handles.mutex);
            const auto found = handles.executables.find(executable);
            if (found == handles.executables.end()) return hipErrorInvalidValue;
            graph = found->second;
        }
        return enqueue("hipGraphLaunch", stream,
                       {NodeType::kGraph, "hipGraphLaunch", [graph] { return graph->launch(); }});
    });
}

EXPORT hipError_t hipGraphExecDestroy(void* executable) {
    return call([&] {
        std::shared_ptr<const Graph> freed;  // without the mutex
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.executables.find(executable);
        if (found == handles.executables.end()) return hipErrorInvalidValue;
        freed = std::move(found->second);
        handles.executables.erase(found);
        return hipSuccess;
    });
}

EXPORT hipError_t hipGraphDestroy(void* graph) {
    return call([&] {
        if (!graph) return hipErrorInvalidValue;
        std::shared_ptr<const Graph> freed;  // without the mutex
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.graphs.find(graph);
        if (found == handles.graphs.end()) return hipErrorIllegalState;
        freed = std::move(found->second);
        handles.graphs.erase(found);
        return hipSuccess;
    });
}

// ---- for host programs whose tensors lie in plain memory ---------------------------------------

// The stream that such a program's launches of this thread go to. PyTorch has none for CPU tensors.
EXPORT void* lae_current_stream() { return current_stream(); }

EXPORT hipError_t lae_set_current_stream(void* stream) {
    return call([&] {
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        current_stream() = stream;
        return hipSuccess;
    });
}

// 1 while `stream` records, or would if the capture were still valid; else 0.
EXPORT int lae_capturing(void* stream) {
    Handles& handles = Handles::get();
    const std::lock_guard lock(handles.mutex);
    return status_of(find_stream(handles, stream)) != CaptureStatus::kNone;
}

// The graph that `stream` is recording may touch this memory: it is registered while a launch of
// the graph runs, as hipHostRegister does for eager launches.
EXPORT hipError_t lae_graph_touches(void* stream, void* memory, size_t bytes) {
    return call([&] {
        if (!memory || !bytes) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const Stream* const found = find_stream(handles, stream);
        if (status_of(found) == CaptureStatus::kNone) return hipErrorIllegalState;
        Graph& graph = *found->capture->graph;
        const uint64_t begin = address(memory);
        for (const auto& own : graph.memory)
            if (own->holds(begin, bytes)) return hipSuccess;
        size_t& most = graph.spans[begin];
        most = std::max(most, bytes);
        return hipSuccess;
    });
}

// Memory that belongs to the graph that `stream` is recording: no hipMalloc, as none is permitted.
// With `contents` it is constant; else each launch of the graph begins with it undefined.
EXPORT hipError_t lae_graph_memory(void* stream, size_t bytes, const void* contents,
                                   void** memory) {
    return call([&] {
        if (!memory || !bytes) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const Stream* const found = find_stream(handles, stream);
        if (status_of(found) == CaptureStatus::kNone) return hipErrorIllegalState;
        auto& own = found->capture->graph->memory;
        own.push_back(std::make_shared<const GraphMemory>(bytes, contents));
        *memory = reinterpret_cast<void*>(own.back()->begin());
        return hipSuccess;
    });
}

// Of a node of a graph: its kernel's name, or the HIP function's; valid as long as the graph is.
// Null for what is no node.
EXPORT const char* lae_node_name(void* node) {
    Handles& handles = Handles::get();
    const std::lock_guard lock(handles.mutex);
    const Node* const found = find_node(handles, node);
    return found ? found->name.c_str() : nullptr;
}
