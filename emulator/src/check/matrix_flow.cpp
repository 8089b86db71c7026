#include <array>

#include "check/undefined.h"

namespace emulator {
namespace {

// Of `side` rows of A or columns of B, whose l-th is in the lanes l, l + side, ..., those that are
// defined in all registers of the operand.
uint32_t defined_lines(const State& st, const Operand& operand, int side) {
    uint64_t good = kAll;
    for (int k = 0; k < operand.dwords; ++k) good &= st.v[operand.index + k];
    for (int step = side; step < kLanes; step *= 2) good &= good >> step;
    return static_cast<uint32_t>(good) & static_cast<uint32_t>((1ull << side) - 1);
}

}  // namespace

// An element of the result takes from one row of A, one column of B and its own addend, so what is
// undefined in others does not matter: kernels leave the rows behind the last query unwritten. The
// layout is in exec/mfma.h.
void matrix_flow(State& st, const Inst& inst, const Info& in) {
    uint64_t good = kAll;
    for (uint16_t r : in.vector_src) good &= st.v[r];
    if (inst.reads_dst)
        for (uint16_t r : in.vector_dst) good &= st.v[r];
    if (good == kAll || in.side == 0) {
        for (uint16_t r : in.vector_dst) st.v[r] = good == kAll ? kAll : 0;
        return;
    }
    const uint32_t rows = defined_lines(st, inst.src[0], in.side);
    uint64_t columns = defined_lines(st, inst.src[1], in.side);
    for (int step = in.side; step < kLanes; step *= 2) columns |= columns << step;
    const Operand& addend = inst.src[2];
    std::array<uint64_t, 16> result{};
    for (int k = 0; k < inst.dst[0].dwords; ++k) {
        for (int first = 0; first < kLanes; first += in.side) {
            const int row = 8 * (k / 4) + 4 * (first / in.side) + k % 4;
            if (rows >> row & 1) result[k] |= ((1ull << in.side) - 1) << first;
        }
        result[k] &= columns;
        if (addend.kind == Kind::vector) result[k] &= st.v[addend.index + k];
    }
    for (int k = 0; k < inst.dst[0].dwords; ++k) st.v[inst.dst[0].index + k] = result[k];
}

}  // namespace emulator
