// Included once by each exec_<variant>.cpp, which defines VARIANT: all handlers of that variant.
#include <array>

#include "exec_memory.h"
#include "exec_mfma.h"
#include "exec_salu.h"
#include "exec_valu.h"

namespace emulator::VARIANT {

namespace {
const std::array<Handler, static_cast<size_t>(Op::count)> built = [] {
    std::array<Handler, static_cast<size_t>(Op::count)> out{};
    register_salu(out.data());
    register_valu(out.data());
    register_mfma(out.data());
    register_memory(out.data());
    return out;
}();
}  // namespace

const Handler* handler_table() { return built.data(); }

}  // namespace emulator::VARIANT
