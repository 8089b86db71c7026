#include "abi/capture.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "abi/handles.h"

namespace emulator {

namespace {

constexpr size_t kPage = 4096;  // before and behind the memory of a graph, too: nobody's bytes
constexpr int kFill = 0xf5;

void invalidate(Capture& capture, const std::string& reason) {
    if (capture.invalid) return;
    capture.invalid = true;
    capture.reason = reason;
}

// Invalidates the captures for which `concerned(stream)` holds. Returns whether there were any.
template <typename Concerned>
bool invalidate_those(const char* function, const std::string& why, Concerned concerned) {
    Handles& handles = Handles::get();
    const std::lock_guard lock(handles.mutex);
    bool any = false;
    for (const auto& [handle, stream] : handles.streams) {
        if (!stream->capture || !concerned(*stream)) continue;
        invalidate(*stream->capture, std::string(function) + ": " + why);
        any = true;
    }
    if (any) Device::latest().text = std::string(function) + ": " + why + "\n";
    return any;
}

// Whether the calling thread must leave unsafe calls alone because of `capture`.
bool forbids_unsafe(const Capture& capture) {
    switch (thread_capture_mode()) {
        case CaptureMode::kRelaxed:
            return false;
        case CaptureMode::kThreadLocal:
            return capture.mode != CaptureMode::kRelaxed &&
                   capture.thread == std::this_thread::get_id();
        case CaptureMode::kGlobal:
            break;
    }
    return capture.mode == CaptureMode::kGlobal || (capture.mode == CaptureMode::kThreadLocal &&
                                                    capture.thread == std::this_thread::get_id());
}

bool active(const Stream& stream) { return stream.capture && !stream.capture->invalid; }

}  // namespace

GraphMemory::GraphMemory(size_t bytes, const void* contents)
    : bytes_(bytes), constant_(contents != nullptr) {
    const size_t block_bytes = (bytes + 3 * kPage - 1) / kPage * kPage;
    block_ = std::aligned_alloc(kPage, block_bytes);
    if (!block_) throw std::bad_alloc();
    std::memset(block_, kFill, block_bytes);
    begin_ = address(block_) + kPage;
    Device::get().memory.add(begin_, bytes_, {.tracked = !constant_, .constant = constant_});
    if (constant_) std::memcpy(reinterpret_cast<void*>(begin_), contents, bytes_);
}

GraphMemory::~GraphMemory() {
    Device::get().memory.remove(begin_, bytes_);
    std::free(block_);
}

void GraphMemory::forget() const {
    if (!constant_) Device::get().memory.mark_unwritten(begin_, bytes_);
}

hipError_t Graph::launch() const {
    struct Registered {
        explicit Registered(const std::map<uint64_t, size_t>& all) : spans(all) {
            for (const auto& [begin, bytes] : spans) Device::get().memory.add(begin, bytes, {});
        }
        ~Registered() {
            for (const auto& [begin, bytes] : spans) Device::get().memory.remove(begin, bytes);
        }
        const std::map<uint64_t, size_t>& spans;
    };
    const Registered registered(spans);
    for (const auto& own : memory) own->forget();
    for (size_t i = 0; i < nodes.size(); ++i) {
        const hipError_t error = nodes[i]->run();
        if (error == hipSuccess) continue;
        Device::latest().text = "node " + std::to_string(i) + " of the graph, " + nodes[i]->name +
                                ", failed\n" + Device::latest().text;
        return error;
    }
    return hipSuccess;
}

CaptureMode& thread_capture_mode() {
    thread_local CaptureMode mode = CaptureMode::kGlobal;
    return mode;
}

hipError_t refuse_unsafe(const char* function) {
    const bool refused =
        invalidate_those(function, "not permitted while a stream is being captured",
                         [](const Stream& s) { return forbids_unsafe(*s.capture); });
    return refused ? hipErrorStreamCaptureUnsupported : hipSuccess;
}

hipError_t refuse_synchronous(const char* function) {
    const bool refused =
        invalidate_those(function, "it would wait for the legacy stream during a capture",
                         [](const Stream&) { return true; });
    return refused ? hipErrorStreamCaptureImplicit : hipSuccess;
}

hipError_t refuse_device_wait(const char* function) {
    const bool refused = invalidate_those(function, "it would wait for a stream that is captured",
                                          [](const Stream&) { return true; });
    return refused ? hipErrorStreamCaptureUnsupported : hipSuccess;
}

hipError_t refuse_wait(const char* function, void* stream) {
    if (const hipError_t error = refuse_legacy(function, stream)) return error;
    const Stream* captured = nullptr;
    {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.streams.find(stream);
        if (found != handles.streams.end() && found->second->capture)
            captured = found->second.get();
    }
    if (!captured) return refuse_unsafe(function);
    invalidate_those(function, "the stream is being captured",
                     [&](const Stream& s) { return &s == captured; });
    return hipErrorStreamCaptureUnsupported;
}

hipError_t refuse_legacy(const char* function, void* stream) {
    if (!is_legacy(stream)) return hipSuccess;
    const bool refused = invalidate_those(
        function, "the legacy stream would depend on a stream that is being captured",
        [](const Stream& s) { return s.blocking && active(s); });
    return refused ? hipErrorStreamCaptureImplicit : hipSuccess;
}

hipError_t enqueue(const char* function, void* stream, Node node) {
    if (const hipError_t error = refuse_legacy(function, stream)) return error;
    {
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.streams.find(stream);
        Capture* const capture =
            found == handles.streams.end() ? nullptr : found->second->capture.get();
        if (capture && capture->invalid) {
            Device::latest().text = capture->reason + "\n";
            return hipErrorStreamCaptureInvalidated;
        }
        if (capture) {
            auto kept = std::make_shared<const Node>(std::move(node));
            capture->last = kept.get();
            capture->graph->nodes.push_back(std::move(kept));
            return hipSuccess;
        }
    }
    return node.run();
}

}  // namespace emulator
