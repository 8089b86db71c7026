#include "timing/constants.h"

#include <stdexcept>

namespace emulator::timing {

Constants Constants::of(std::span<const double> values) {
    if (values.size() != table().size())
        throw std::invalid_argument("the timing model has another number of constants");
    Constants constants;
    size_t i = 0;
#define CONSTANT(name, value, unit, low, high, source) constants.name = values[i++];
#include "timing/constants.def"
#undef CONSTANT
    return constants;
}

const std::vector<Entry>& table() {
    static const std::vector<Entry> entries = {
#define CONSTANT(name, value, unit, low, high, source) {#name, unit, source, value, low, high},
#include "timing/constants.def"
#undef CONSTANT
    };
    return entries;
}

}  // namespace emulator::timing
