#include "hip_api.h"

#include <dlfcn.h>
#include <link.h>

#include <string_view>
#include <vector>

namespace liteattention::hip {
namespace {

constexpr const char* kSonames[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};
constexpr std::string_view kStem = "libamdhip64";
constexpr const char* kRemedy =
    ": install PyTorch for ROCm, or set LITEATTENTION_HIP_LIBRARY to a libamdhip64 or to the "
    "software MI300X (`liteattention-rocm emulate --library` prints its path)";

std::string Join(const std::vector<std::string>& parts, const char* separator) {
    std::string joined;
    for (const std::string& part : parts) {
        if (!joined.empty()) joined += separator;
        joined += part;
    }
    return joined;
}

std::string LoaderError() {
    const char* text = dlerror();
    return text ? text : "unknown loader error";
}

bool IsRunTime(std::string_view path) {
    return path.substr(path.rfind('/') + 1).substr(0, kStem.size()) == kStem;
}

// A process may hold two: one that PyTorch brings, and the system's, which another library loaded.
// The first has the streams and memory of PyTorch's tensors.
std::string LoadedByTorch() {
    for (const char* library : {"libc10_hip.so", "libtorch_hip.so"}) {
        void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
        if (!handle) continue;
        Dl_info found = {};
        void* const function = dlsym(handle, "hipInit");  // looks into what the library depends on
        const bool known = function && dladdr(function, &found) && found.dli_fname;
        const std::string path = known ? found.dli_fname : "";
        dlclose(handle);
        if (IsRunTime(path)) return path;
    }
    return {};
}

std::string LoadedAlready() {
    std::string found = LoadedByTorch();
    if (!found.empty()) return found;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* out) {
            const std::string_view path = info->dlpi_name ? info->dlpi_name : "";
            if (!IsRunTime(path)) return 0;
            *static_cast<std::string*>(out) = path;
            return 1;
        },
        &found);
    return found;
}

// A run-time that is opened twice is loaded once, and registers for all who opened it. Key: its
// handle; lifetime of an entry: that of the Library objects of the handle.
std::shared_ptr<HostSpans> SpansOf(void* handle, const Functions& api,
                                   const EmulatorFunctions& emulator) {
    static std::mutex mutex;
    static std::map<void*, std::weak_ptr<HostSpans>> all;
    const std::lock_guard lock(mutex);
    std::weak_ptr<HostSpans>& entry = all[handle];
    std::shared_ptr<HostSpans> spans = entry.lock();
    if (!spans) entry = spans = std::make_shared<HostSpans>(api, emulator);
    return spans;
}

}  // namespace

Library::Library(void* handle, std::string path) : path_(std::move(path)) {
    std::vector<std::string> missing;
#define LITEATTENTION_FIND(name, parameters, result)                         \
    api_.name = reinterpret_cast<decltype(api_.name)>(dlsym(handle, #name)); \
    if (!api_.name) missing.emplace_back(#name);
    LITEATTENTION_HIP_FUNCTIONS(LITEATTENTION_FIND)
#undef LITEATTENTION_FIND
    emulated_ = dlsym(handle, "lae_abi_version") != nullptr;
#define LITEATTENTION_FIND(name, parameters, result)                                   \
    emulator_.name = reinterpret_cast<decltype(emulator_.name)>(dlsym(handle, #name)); \
    if (emulated_ && !emulator_.name) missing.emplace_back(#name);
    LITEATTENTION_EMULATOR_FUNCTIONS(LITEATTENTION_FIND)
#undef LITEATTENTION_FIND
    if (!missing.empty())
        throw Unavailable("the HIP run-time " + path_ + " lacks " + Join(missing, ", ") + kRemedy);
    host_spans_ = SpansOf(handle, api_, emulator_);
}

namespace {

// What a capture forbids to others is permitted to this thread meanwhile.
class Relaxed {
   public:
    explicit Relaxed(Error (*exchange)(int*)) : exchange_(exchange) { exchange_(&mode_); }
    ~Relaxed() { exchange_(&mode_); }
    Relaxed(const Relaxed&) = delete;
    Relaxed& operator=(const Relaxed&) = delete;

   private:
    Error (*exchange_)(int*);
    int mode_ = 2;  // hipStreamCaptureModeRelaxed, then what it was before
};

}  // namespace

Error HostSpans::Add(void* begin, size_t bytes) {
    const Relaxed relaxed(exchange_mode_);
    const std::lock_guard lock(mutex_);
    Spans& spans = spans_[begin];
    if (spans.registered.empty() || spans.registered.back() < bytes) {
        if (const Error error = register_(begin, bytes, 0)) {
            if (spans.wanted.empty()) spans_.erase(begin);
            return error;
        }
        spans.registered.push_back(bytes);
    }
    spans.wanted.insert(bytes);
    return 0;
}

void HostSpans::Remove(void* begin, size_t bytes) {
    const Relaxed relaxed(exchange_mode_);
    const std::lock_guard lock(mutex_);
    const auto found = spans_.find(begin);
    Spans& spans = found->second;
    spans.wanted.erase(spans.wanted.find(bytes));
    const size_t needed = spans.wanted.empty() ? 0 : *spans.wanted.rbegin();
    // Never a moment at which less than `needed` is registered: other launches are running. A span
    // that is too long thus stays while none between it and `needed` was registered.
    const auto next = [&] {
        const size_t count = spans.registered.size();
        return count > 1 ? spans.registered[count - 2] : 0;
    };
    while (!spans.registered.empty() && next() >= needed) {
        unregister_(begin);
        spans.registered.pop_back();
    }
    if (spans.wanted.empty()) spans_.erase(found);
}

std::shared_ptr<const Library> Library::Open(const std::string& path) {
    std::vector<std::string> tried;
    // Local: the names of a second HIP run-time must not bind to what is loaded already.
    constexpr int kMode = RTLD_NOW | RTLD_LOCAL;
    const auto open = [&](const std::string& file, int mode) -> std::shared_ptr<const Library> {
        if (void* handle = dlopen(file.c_str(), mode))
            return std::shared_ptr<const Library>(new Library(handle, file));
        tried.push_back(LoaderError());
        return nullptr;
    };
    if (!path.empty()) {
        if (auto library = open(path, kMode)) return library;
        throw Unavailable("cannot open the HIP run-time of LITEATTENTION_HIP_LIBRARY: " +
                          Join(tried, "; ") + kRemedy);
    }
    const std::string loaded = LoadedAlready();
    if (loaded.empty()) {
        tried.emplace_back("none is loaded in this process");
    } else if (auto library = open(loaded, kMode | RTLD_NOLOAD)) {
        return library;
    }
    for (const char* soname : kSonames)
        if (auto library = open(soname, kMode)) return library;
    throw Unavailable("no HIP run-time (libamdhip64): LITEATTENTION_HIP_LIBRARY is not set; " +
                      Join(tried, "; ") + kRemedy);
}

void Library::Check(Error error, const std::string& what, bool reported) const {
    if (error == 0) return;
    const auto text = [](const char* s) { return std::string(s ? s : "?"); };
    std::string message = what + " failed: " + text(api_.hipGetErrorName(error)) + " (" +
                          std::to_string(error) + "): " + text(api_.hipGetErrorString(error));
    if (emulated_ && reported) {
        const std::string report = text(emulator_.lae_last_report());
        if (!report.empty()) message += "\n" + report;
    }
    // Otherwise the next unrelated PyTorch call would report this error as its own.
    api_.hipGetLastError();
    throw CallFailed(message);
}

void* Library::GraphMemory(Stream stream, size_t bytes, const void* contents) const {
    void* memory = nullptr;
    Check(emulator_.lae_graph_memory(stream, bytes, contents, &memory), "lae_graph_memory");
    return memory;
}

int Library::DeviceCount() const {
    Check(api_.hipInit(0), "hipInit of " + path_);
    int count = 0;
    Check(api_.hipGetDeviceCount(&count), "hipGetDeviceCount of " + path_);
    return count;
}

std::string Library::Version() const {
    int version = 0;
    Check(api_.hipRuntimeGetVersion(&version), "hipRuntimeGetVersion of " + path_);
    // HIP encodes major * 10^7 + minor * 10^5 + patch.
    return std::to_string(version / 10000000) + "." + std::to_string(version / 100000 % 100) + "." +
           std::to_string(version % 100000);
}

}  // namespace liteattention::hip
