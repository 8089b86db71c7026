// HIP functions for modules, kernels and launches. A launch is done when the call returns, or it is
// captured.
#include <algorithm>
#include <cstring>

#include "abi/handles.h"
#include "abi/recording.h"

namespace emulator {

namespace {

// Lays out the explicit arguments. Returns what is wrong with them, "" when nothing is.
std::string gather(const Kernel& kernel, void** params, void** extra,
                   std::vector<uint8_t>& arguments) {
    if (extra) {
        const void* buffer = nullptr;
        const size_t* bytes = nullptr;
        for (void** item = extra; *item != reinterpret_cast<void*>(3); item += 2) {
            if (item[0] == reinterpret_cast<void*>(1))
                buffer = item[1];
            else if (item[0] == reinterpret_cast<void*>(2))
                bytes = static_cast<size_t*>(item[1]);
            else
                return "the list of launch parameters has a key that is neither buffer nor size";
        }
        if (!bytes || (!buffer && *bytes))
            return "the list of launch parameters lacks the buffer or its size";
        // A run-time copies what the metadata declares: of a shorter buffer, what lies behind it.
        // What a longer one has more never reaches the kernel.
        for (const Argument& argument : kernel.arguments)
            if (!argument.hidden() && uint64_t{argument.offset} + argument.size > *bytes)
                return "the argument buffer has " + std::to_string(*bytes) +
                       " bytes, the kernel's metadata declares " +
                       std::to_string(kernel.explicit_bytes()) + ": argument '" + argument.name +
                       "' takes bytes " + std::to_string(argument.offset) + " to " +
                       std::to_string(argument.offset + argument.size);
        const auto* data = static_cast<const uint8_t*>(buffer);
        arguments.assign(data, data + std::min<size_t>(*bytes, kernel.kernarg_bytes));
        return "";
    }
    if (!params)
        return kernel.explicit_bytes() ? "no arguments were passed, the kernel takes some" : "";
    if (kernel.arguments.empty() && kernel.kernarg_bytes)
        return "the metadata does not say which arguments there are: pass them as a buffer";
    arguments.assign(kernel.explicit_bytes(), 0);
    for (const Argument& argument : kernel.arguments) {
        if (argument.hidden()) continue;
        if (!*params) return "argument '" + argument.name + "' is missing";
        std::memcpy(arguments.data() + argument.offset, *params++, argument.size);
    }
    return "";
}

// Runs a launch without objections on the calling thread, whose latest it becomes.
hipError_t run_now(const std::shared_ptr<const Module>& module, const Launch& launch) {
    Latest& latest = Device::latest();
    latest = Latest{};
    forget_recording();
    latest.module = module;
    latest.kernel = launch.kernel;
    latest.report = std::make_unique<Report>();
    const Options options = recording(Device::get().options(), launch.kernel->name);
    run(launch, Device::get().memory, options, *latest.report);
    keep_recording(*latest.report, module->object, *launch.kernel);
    latest.text = latest.report->text(module->object, *launch.kernel);
    return latest.text.empty() ? hipSuccess : hipErrorLaunchFailure;
}

}  // namespace
}  // namespace emulator

using namespace emulator;

EXPORT hipError_t hipModuleLoadData(void** module, const void* image) {
    return call([&]() -> hipError_t {
        if (!module || !image) return hipErrorInvalidValue;
        if (const hipError_t error = refuse_unsafe("hipModuleLoadData")) return error;
        auto loaded = std::make_shared<const Module>(image, 0, Device::get().options());
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const void* handle = loaded.get();
        handles.modules[handle].module = std::move(loaded);
        *module = const_cast<void*>(handle);
        return hipSuccess;
    });
}

EXPORT hipError_t hipModuleUnload(void* module) {
    return call([&]() -> hipError_t {
        if (const hipError_t error = refuse_unsafe("hipModuleUnload")) return error;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.modules.find(module);
        if (found == handles.modules.end()) return hipErrorInvalidHandle;
        for (const auto& [name, function] : found->second.functions)
            handles.functions.erase(function.get());
        handles.modules.erase(found);
        return hipSuccess;
    });
}

EXPORT hipError_t hipModuleGetFunction(void** function, void* module, const char* name) {
    return call([&] {
        if (!function || !name) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.modules.find(module);
        if (found == handles.modules.end()) return hipErrorInvalidHandle;
        const Kernel* kernel = found->second.module->object.kernel(name);
        if (!kernel) return hipErrorNotFound;
        std::unique_ptr<Function>& slot = found->second.functions[name];
        if (!slot) {
            slot = std::make_unique<Function>(Function{found->second.module, kernel});
            handles.functions[slot.get()] = slot.get();
        }
        *function = slot.get();
        return hipSuccess;
    });
}

EXPORT hipError_t hipModuleLaunchKernel(void* function, unsigned grid_x, unsigned grid_y,
                                        unsigned grid_z, unsigned block_x, unsigned block_y,
                                        unsigned block_z, unsigned lds_bytes, void* stream,
                                        void** params, void** extra) {
    return call([&]() -> hipError_t {
        Latest& latest = Device::latest();
        latest = Latest{};
        forget_recording();
        if (!Handles::get().stream(stream)) return hipErrorInvalidHandle;
        {
            Handles& handles = Handles::get();
            const std::lock_guard lock(handles.mutex);
            const auto found = handles.functions.find(function);
            if (found == handles.functions.end()) return hipErrorInvalidHandle;
            latest.module = found->second->module;  // an unload in another thread must wait for us
            latest.kernel = found->second->kernel;
        }
        if (params && extra) return hipErrorInvalidValue;
        Launch launch{&latest.module->object,      latest.kernel, {grid_x, grid_y, grid_z},
                      {block_x, block_y, block_z}, lds_bytes,     {}};
        const std::string wrong = gather(*latest.kernel, params, extra, launch.arguments);
        if (!wrong.empty()) {
            latest.text = latest.kernel->name + ": " + wrong + "\n";
            return hipErrorInvalidValue;
        }
        latest.text = objections(launch);
        if (!latest.text.empty()) {
            if (!latest.kernel->unimplemented.empty()) return hipErrorNotSupported;
            if (latest.kernel->lds_bytes + uint64_t{lds_bytes} > kLds)
                return hipErrorLaunchOutOfResources;
            return hipErrorInvalidConfiguration;
        }
        const std::string name = latest.kernel->name;
        return enqueue(
            "hipModuleLaunchKernel", stream,
            {NodeType::kKernel, name, [module = latest.module, launch = std::move(launch)] {
                 return run_now(module, launch);
             }});
    });
}

EXPORT hipError_t hipFuncGetAttribute(int* value, int attribute, const void* function) {
    return call([&] {
        if (!value) return hipErrorInvalidValue;
        Handles& handles = Handles::get();
        const std::lock_guard lock(handles.mutex);
        const auto found = handles.functions.find(function);
        if (found == handles.functions.end()) return hipErrorInvalidHandle;
        const Kernel& kernel = *found->second->kernel;
        switch (attribute) {
            case 0:
                *value = static_cast<int>(kernel.max_workgroup);
                break;
            case 1:
                *value = static_cast<int>(kernel.lds_bytes);
                break;
            case 3:
                *value = static_cast<int>(kernel.scratch_bytes);
                break;
            case 4:
                *value = static_cast<int>(kernel.vgprs);
                break;
            case 5:
            case 6:
                *value = 94;
                break;
            case 2:
            case 7:
            case 9:
                *value = 0;
                break;
            case 8:
                *value = kLds - static_cast<int>(kernel.lds_bytes);
                break;
            default:
                return hipErrorInvalidValue;
        }
        return hipSuccess;
    });
}
