// Stream capture: what a graph holds, which streams record into one instead of running, and which
// calls HIP forbids meanwhile.
//
// The rules are those of HIP's documentation and of its run-time for AMD GPUs (ROCm/clr). Where
// versions differ, the stricter one holds, so that what passes here passes on all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "abi/hip_types.h"

namespace emulator {

enum class CaptureMode { kGlobal, kThreadLocal, kRelaxed };        // hipStreamCaptureMode
enum class CaptureStatus { kNone, kActive, kInvalidated };         // hipStreamCaptureStatus
enum class NodeType { kKernel, kMemcpy, kMemset, kHost, kGraph };  // hipGraphNodeType

// One operation with its arguments as they were when it was captured. `run` may be called any
// number of times, from any thread.
struct Node {
    NodeType type;
    std::string name;  // of the kernel, or of the HIP function
    std::function<hipError_t()> run;
};

// Memory that belongs to a graph and to what was instantiated from it.
class GraphMemory {
   public:
    // Constants, where `contents` are given; else each launch begins with all of it undefined.
    // Throws std::bad_alloc.
    GraphMemory(size_t bytes, const void* contents);
    ~GraphMemory();
    GraphMemory(const GraphMemory&) = delete;
    GraphMemory& operator=(const GraphMemory&) = delete;

    void forget() const;
    bool holds(uint64_t begin, size_t bytes) const {
        return begin >= begin_ && begin + bytes <= begin_ + bytes_;
    }
    uint64_t begin() const { return begin_; }

   private:
    void* block_;
    uint64_t begin_;
    size_t bytes_;
    bool constant_;
};

// Nodes in an order that respects their dependencies. Immutable once the capture has ended; what is
// instantiated from it is a copy.
struct Graph {
    std::vector<std::shared_ptr<const Node>> nodes;
    std::map<uint64_t, size_t> spans;  // host memory that its kernels may touch: begin, bytes
    std::vector<std::shared_ptr<const GraphMemory>> memory;

    // Runs every node in order and stops at the first that fails; lae_last_report() then says
    // which.
    hipError_t launch() const;
};

// A capture under way. Guarded by the mutex of Handles.
struct Capture {
    CaptureMode mode = CaptureMode::kGlobal;
    std::thread::id thread;  // that began it
    bool invalid = false;
    std::string reason;  // why it is
    uint64_t id = 0;
    const void* last = nullptr;  // node that the next one comes after
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
};

// hipThreadExchangeStreamCaptureMode's, of the calling thread.
CaptureMode& thread_capture_mode();

// Each returns hipSuccess, or the error that `function` must return now; an error has invalidated
// the captures that it concerns.
//
// Calls that may be unsafe while this thread, or, in the global mode, any thread captures.
hipError_t refuse_unsafe(const char* function);
// Calls that imply work on the legacy stream and a wait for it.
hipError_t refuse_synchronous(const char* function);
// Calls that wait for the whole device.
hipError_t refuse_device_wait(const char* function);
// Calls that wait for, or ask about, a stream, which must exist.
hipError_t refuse_wait(const char* function, void* stream);
// Calls that put work on a stream: of them, those on the legacy stream.
hipError_t refuse_legacy(const char* function, void* stream);

// Adds a node to the graph that `stream` is recording, or runs it at once.
hipError_t enqueue(const char* function, void* stream, Node node);

}  // namespace emulator
