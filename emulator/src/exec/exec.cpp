#include "exec/exec.h"

#include <stdexcept>

#ifdef EMULATOR_X86
#include "host_features.h"
#endif

namespace emulator {

namespace portable {
const Handler* handler_table();
}
#ifdef EMULATOR_X86
namespace avx2 {
const Handler* handler_table();
}
namespace avx512 {
const Handler* handler_table();
}
#endif

std::vector<std::string> variants() {
    std::vector<std::string> names;
#ifdef EMULATOR_X86
    const liteattention::HostFeatures host = liteattention::DetectHostFeatures();
    if (host.avx512) names.emplace_back("avx512");
    if (host.avx2) names.emplace_back("avx2");
#endif
    names.emplace_back("portable");
    return names;
}

namespace {
std::string filled(std::string what, int64_t number) {
    const size_t place = what.find('#');
    return place == what.npos ? what : what.replace(place, 1, std::to_string(number));
}
}  // namespace

void fail(const char* what, int64_t number) { throw std::runtime_error(filled(what, number)); }

void fail(const Inst& inst, const char* what, int64_t number) {
    throw std::runtime_error(std::string(inst.name) + " at byte " + std::to_string(inst.offset) +
                             " of the code: " + filled(what, number));
}

const Handler* handlers(const std::string& variant) {
    const std::vector<std::string> names = variants();
    const std::string wanted = variant.empty() ? names.front() : variant;
    for (const std::string& name : names) {
        if (name != wanted) continue;
#ifdef EMULATOR_X86
        if (name == "avx512") return avx512::handler_table();
        if (name == "avx2") return avx2::handler_table();
#endif
        return portable::handler_table();
    }
    throw std::invalid_argument("emulator variant '" + wanted + "' is not available here");
}

}  // namespace emulator
