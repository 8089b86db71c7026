#include "machine/lanes.h"

#include <array>

namespace emulator {
namespace {

int dpp_source(int control, int lane) {
    const int row = lane & ~15, in_row = lane & 15, n = control & 15;
    if (control <= 0xff) return (lane & ~3) | (control >> 2 * (lane & 3) & 3);  // quad_perm
    switch (control >> 4) {
        case 0x10:  // row_shl
            return in_row + n < 16 ? lane + n : -1;
        case 0x11:  // row_shr
            return in_row >= n ? lane - n : -1;
        case 0x12:  // row_ror
            return row | ((in_row - n) & 15);
        case 0x15:  // row_newbcast
            return row | n;
        default:
            break;
    }
    switch (control) {
        case 0x130:  // wave_shl
            return lane < 63 ? lane + 1 : -1;
        case 0x134:  // wave_rol
            return (lane + 1) & 63;
        case 0x138:  // wave_shr
            return lane - 1;
        case 0x13c:  // wave_ror
            return (lane - 1) & 63;
        case 0x140:  // row_mirror
            return lane ^ 15;
        case 0x141:  // row_half_mirror
            return lane ^ 7;
        case 0x142:  // row_bcast:15
            return row - 1;
        case 0x143:  // row_bcast:31
            return lane >= 32 ? 31 : -1;
        default:
            return -1;
    }
}

}  // namespace

const DppLanes& dpp_lanes(uint32_t control) {
    static const auto table = [] {
        std::array<DppLanes, 512> all;
        for (int c = 0; c < 512; ++c)
            for (int lane = 0; lane < kLanes; ++lane)
                all[c].from[lane] = static_cast<int8_t>(dpp_source(c, lane));
        return all;
    }();
    return table[control & 511];
}

}  // namespace emulator
