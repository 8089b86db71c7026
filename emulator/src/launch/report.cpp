#include "launch/report.h"

namespace emulator {

std::string Report::text(const CodeObject& object, const Kernel& kernel) const {
    std::string out;
    for (const auto& [key, finding] : findings.all()) {
        out += kernel.name + ": " + finding.kind + " at " + object.describe(finding.offset) +
               ": workgroup " + std::to_string(finding.workgroup) + ", wave " +
               std::to_string(finding.wave) + ": " + finding.detail;
        if (finding.count > 1) out += " (" + std::to_string(finding.count) + " times)";
        out += '\n';
    }
    return out;
}

}  // namespace emulator
