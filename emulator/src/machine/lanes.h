// Which lanes read from which in the instructions that move data between lanes.
#pragma once

#include <cstdint>

#include "isa/inst.h"

namespace emulator {

// Where each lane of a DPP operand reads from: a lane, or -1 when that is out of bounds.
struct DppLanes {
    int8_t from[kLanes];
};
const DppLanes& dpp_lanes(uint32_t control);

// Which lane ds_swizzle_b32 reads for `lane`, by its offset field: FFT, rotate, quad permute or bit
// mask mode (MI300 manual, DS_SWIZZLE_B32; groups of 32 lanes, quads of 4).
inline int swizzle_source(int offset, int lane) {
    const int within = lane & 31, group = lane & 32;
    if (offset >= 0xe000) {
        const int mask = offset & 31;
        int reversed = 0, ones = 0;
        for (int bit = 0; bit < 5; ++bit) {
            reversed |= (within >> bit & 1) << (4 - bit);
            ones += mask >> bit & 1;
        }
        return reversed >> ones | (within & mask) | group;
    }
    if (offset >= 0xc000) {
        const int mask = offset & 31;
        int rotate = offset >> 5 & 31;
        if (offset >> 10 & 1) rotate = -rotate;
        return (within & mask) | ((within + rotate) & ~mask & 31) | group;
    }
    if (offset & 0x8000) return (lane & ~3) | (offset >> 2 * (lane & 3) & 3);
    return ((((within & offset) | (offset >> 5 & 31)) ^ (offset >> 10 & 31)) & 31) | group;
}

}  // namespace emulator
