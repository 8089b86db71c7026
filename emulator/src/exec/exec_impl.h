// Included once by each exec_<variant>.cpp, which defines VARIANT: all handlers of that variant.
//
// A processor may lack this variant's instructions and still loads the library. So nothing here runs
// before handler_table() is called, and no function of another namespace is compiled here: the
// linker may take this file's copy for the whole library. cmake/check_instruction_sets.cmake checks.
#include <array>

#include "exec/memory.h"
#include "exec/mfma.h"
#include "exec/scalar.h"
#include "exec/vector.h"

namespace emulator::VARIANT {

const Handler* handler_table() {
    static const std::array<Handler, static_cast<size_t>(Op::count)> built = [] {
        std::array<Handler, static_cast<size_t>(Op::count)> out{};
        register_salu(out.data());
        register_valu(out.data());
        register_mfma(out.data());
        register_memory(out.data());
        return out;
    }();
    return built.data();
}

}  // namespace emulator::VARIANT
