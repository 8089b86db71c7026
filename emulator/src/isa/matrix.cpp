#include "isa/matrix.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace emulator {
namespace {

// As the mnemonic says: v_mfma_f32_16x16x16_bf16, or v_mfma_f32_4x4x4_16b_f16 with 16 blocks.
struct Shape {
    int m = 0, n = 0, k = 0, blocks = 1;
    bool sparse = false, known = false;
};

Shape shape_of(const Inst& inst) {
    Shape shape;
    if (inst.unit != Unit::mfma) return shape;
    shape.sparse = std::strncmp(inst.name, "v_smfmac", 8) == 0;
    const char* text = std::strchr(inst.name + (shape.sparse ? 9 : 7), '_');
    // "_2b" is a number of blocks, "_bf16" and "_fp8" are no numbers.
    shape.known = text && std::sscanf(text, "_%dx%dx%d_%db", &shape.m, &shape.n, &shape.k,
                                      &shape.blocks) >= 3;
    shape.blocks = std::max(shape.blocks, 1);
    return shape;
}

bool ends_with(const char* text, const char* suffix) {
    const size_t length = std::strlen(text), tail = std::strlen(suffix);
    return length >= tail && std::strcmp(text + length - tail, suffix) == 0;
}

}  // namespace

int matrix_passes(const Inst& inst) {
    const Shape shape = shape_of(inst);
    if (!shape.known) return 0;
    if (std::strstr(inst.name, "f64")) return shape.m == 4 ? 4 : 8;
    if (shape.sparse) return shape.m == 16 ? 4 : 8;
    if (shape.m == 4) return 2;
    const bool xf32 = ends_with(inst.name, "xf32");
    if (shape.m == 16) return shape.k >= 16 || xf32 ? 4 : 8;
    return shape.k >= 8 || xf32 ? 8 : 16;
}

uint64_t matrix_flops(const Inst& inst) {
    const Shape shape = shape_of(inst);
    if (!shape.known) return 0;
    const uint64_t products = uint64_t{1} * shape.m * shape.n * shape.k * shape.blocks;
    return shape.sparse ? products : 2 * products;
}

}  // namespace emulator
