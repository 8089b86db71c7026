// Included once by each exec_<variant>.cpp, which defines VARIANT: all handlers of that variant.
//
// A processor may lack this variant's instructions and still loads the library. So nothing here
// runs before handler_table() is called, and no function of another namespace is compiled here: the
// linker may take this file's copy for the whole library. cmake/check_instruction_sets.cmake
// checks.
#include <array>

#include "exec/compares.h"
#include "exec/conversions.h"
#include "exec/division.h"
#include "exec/dot.h"
#include "exec/float.h"
#include "exec/integer.h"
#include "exec/memory.h"
#include "exec/mfma.h"
#include "exec/moves.h"
#include "exec/packed.h"
#include "exec/scalar.h"

namespace emulator::VARIANT {

const Handler* handler_table() {
    static const std::array<Handler, static_cast<size_t>(Op::count)> built = [] {
        std::array<Handler, static_cast<size_t>(Op::count)> out{};
        register_salu(out.data());
        register_moves(out.data());
        register_integer(out.data());
        register_float(out.data());
        register_division(out.data());
        register_conversions(out.data());
        register_compares(out.data());
        register_packed(out.data());
        register_dot(out.data());
        register_mfma(out.data());
        register_memory(out.data());
        return out;
    }();
    return built.data();
}

}  // namespace emulator::VARIANT
