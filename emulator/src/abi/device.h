// The one emulated device of a process, behind both C ABIs.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "exec/exec.h"
#include "launch/launch.h"
#include "launch/waves.h"

namespace emulator {

// A loaded module. Key: its handle; owner: the device until hipModuleUnload, and launches under
// way.
struct Module {
    Module(const void* image, size_t size, const Options& options) : object(image, size) {
        object.bind(handlers(options.variant), trap);
    }
    CodeObject object;
};

// Of the device and its limits.
inline constexpr int kLds = 65536;
inline constexpr size_t kGlobalMemory = size_t{192} << 30;

// What a thread's latest launch did.
struct Latest {
    std::shared_ptr<const Module> module;
    const Kernel* kernel = nullptr;
    std::unique_ptr<Report> report;
    std::string text;  // findings or the reasons why it did not run; "" when all is well
};

// Key: the process; owner: a function-local static, made on first use; thread-safe.
class Device {
   public:
    static Device& get();

    Memory memory;

    // Options for a launch now: the environment's, then those set by hand. Throws
    // std::invalid_argument.
    Options options() const;
    // Sets an option for all later launches; "" returns to the environment's value.
    void set_option(const std::string& name, const std::string& value);

    static Latest& latest();  // of the calling thread

   private:
    mutable std::mutex mutex_;
    std::map<std::string, std::string> set_;
};

}  // namespace emulator
