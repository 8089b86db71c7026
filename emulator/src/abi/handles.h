// What the handles of the C functions stand for, and how these report errors.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "abi/capture.h"
#include "abi/device.h"
#include "abi/hip_types.h"

namespace emulator {

struct Function {
    std::shared_ptr<const Module> module;
    const Kernel* kernel;
};

struct Stream {
    bool blocking = true;              // it waits for the legacy stream, and that for it
    std::unique_ptr<Capture> capture;  // under way
};
struct Event {
    bool recorded = false;
    const void* captured = nullptr;  // stream whose capture the last record belongs to
    std::chrono::steady_clock::time_point time;
};

// Objects behind handles. Key: the process; thread-safe under its mutex.
struct Handles {
    struct Loaded {
        std::shared_ptr<const Module> module;
        std::map<std::string, std::unique_ptr<Function>> functions;
    };
    std::mutex mutex;
    std::map<const void*, Loaded> modules;
    std::map<const void*, Function*> functions;
    std::map<uint64_t, std::pair<void*, size_t>> allocations;  // begin -> block, bytes
    std::multimap<uint64_t, size_t> registered;
    std::map<const void*, std::unique_ptr<Stream>> streams;
    std::map<const void*, std::unique_ptr<Event>> events;
    std::map<const void*, std::shared_ptr<const Graph>> graphs;
    std::map<const void*, std::shared_ptr<const Graph>> executables;
    uint64_t captures = 0;  // begun so far

    Handles() { Device::get(); }  // outlives what the graphs hold
    ~Handles() {
        for (auto& [begin, allocation] : allocations) std::free(allocation.first);
    }
    static Handles& get() {
        static Handles handles;
        return handles;
    }
    bool stream(const void* handle) {  // null and the two tagged default streams are always there
        const auto value = reinterpret_cast<uintptr_t>(handle);
        if (value <= 2) return true;
        const std::lock_guard lock(mutex);
        return streams.count(handle) != 0;
    }
};

// The default stream that waits for all blocking ones: the null handle and hipStreamLegacy.
inline bool is_legacy(const void* stream) { return reinterpret_cast<uintptr_t>(stream) <= 1; }

inline hipError_t& last_error() {
    thread_local hipError_t error = hipSuccess;
    return error;
}

// Remembers an error for hipGetLastError and keeps exceptions from leaving C functions.
template <typename Body>
hipError_t call(Body body) {
    hipError_t error;
    try {
        error = body();
    } catch (const WrongTarget& problem) {
        Device::latest().text = problem.what();
        error = hipErrorNoBinaryForGpu;
    } catch (const BadCodeObject& problem) {
        Device::latest().text = problem.what();
        error = hipErrorInvalidImage;
    } catch (const std::invalid_argument& problem) {
        Device::latest().text = problem.what();
        error = hipErrorInvalidValue;
    } catch (const std::bad_alloc&) {
        error = hipErrorOutOfMemory;
    } catch (const std::exception& problem) {
        Device::latest().text = problem.what();
        error = hipErrorUnknown;
    }
    if (error != hipSuccess) last_error() = error;
    return error;
}

inline uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace emulator
