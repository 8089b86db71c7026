#include "abi/device.h"

#include <cstdlib>

namespace emulator {

Device& Device::get() {
    static Device device;
    return device;
}

Latest& Device::latest() {
    thread_local Latest latest;
    return latest;
}

Options Device::options() const {
    Options options = Options::from_environment();
    const std::lock_guard lock(mutex_);
    for (const auto& [name, value] : set_) options.set(name, value);
    if (set_.count("check") && !set_.count("count") && !std::getenv("LITEATTENTION_EMULATOR_COUNT"))
        options.count = options.check;
    return options;
}

void Device::set_option(const std::string& name, const std::string& value) {
    Options().set(name, value.empty() ? (name == "check" || name == "count" ? "on"
                                         : name == "order"                  ? "round-robin"
                                         : name == "variant"                ? ""
                                                                            : "1")
                                      : value);
    const std::lock_guard lock(mutex_);
    if (value.empty())
        set_.erase(name);
    else
        set_[name] = value;
}

}  // namespace emulator
