// Accesses to LDS: bounds, alignment, races, and definedness per byte.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "check/checker_impl.h"
#include "check/undefined.h"
#include "isa/text.h"

namespace emulator {
namespace {

using Pair = uint64_t __attribute__((vector_size(16)));

}  // namespace

void Checker::Impl::outside_lds(const Wave& wave, const Inst& inst, const char* does,
                                const uint32_t* address, uint64_t lanes) {
    report(wave, inst, "LDS out of bounds", [&] {
        return to_string(inst) + does + " LDS byte " + hex(address[std::countr_zero(lanes)]) +
               " in " + lanes_text(lanes) + "; the workgroup has " + std::to_string(lds_bytes) +
               " bytes";
    });
}

void Checker::lds_access(Wave& wave, const Inst& inst, const uint32_t* address, uint64_t lanes,
                         uint32_t bytes, Access access, uint32_t dword) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    if (!c.lds_ready) c.make_lds();
    // Inside the allocation?
    uint64_t outside = 0;
    uint32_t merged = 0;
    bool some = lanes != kAll || c.lds_bytes < bytes;
    if (!some) {
        const uint32_t limit = static_cast<uint32_t>(c.lds_bytes) - bytes;
        uint32_t above = 0;
        for (int lane = 0; lane < kLanes; ++lane) {
            merged |= address[lane];
            above |= address[lane] > limit;
        }
        some = above != 0;
    }
    if (some)
        for (uint64_t left = lanes; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            merged |= address[lane];
            if (static_cast<uint64_t>(address[lane]) + bytes > c.lds_bytes) outside |= 1ull << lane;
        }
    if (outside) {
        c.outside_lds(wave, inst, " accesses", address, outside);
        lanes &= ~outside;
    }
    if (access == Access::atomic && merged % bytes != 0)
        lanes &= ~c.misaligned(wave, inst, " at LDS byte ", address, lanes, bytes);
    if (!lanes) return;
    const uint32_t op = c.races.new_lds_op(wave, st, inst);
    c.races.access(wave, st, inst, address, lanes, bytes,
                   access == Access::load    ? Use::read
                   : access == Access::store ? Use::write
                                             : Use::atomic,
                   op, dword);
    // Definedness travels with the data.
    const uint32_t count = (bytes + 3) / 4;
    uint8_t* defined = c.lds_defined.data();
    if (access != Access::store) {
        uint64_t all = kAll;
        if (bytes == 16) {
            Pair both = {kAll, kAll};
            for (uint64_t left = lanes; left; left &= left - 1) {
                Pair value;
                std::memcpy(&value, defined + address[std::countr_zero(left)], 16);
                both &= value;
            }
            all = both[0] & both[1];
        } else if (bytes == 8) {
            for (uint64_t left = lanes; left; left &= left - 1) {
                uint64_t value;
                std::memcpy(&value, defined + address[std::countr_zero(left)], 8);
                all &= value;
            }
        } else if (bytes == 4) {
            for (uint64_t left = lanes; left; left &= left - 1) {
                uint32_t value;
                std::memcpy(&value, defined + address[std::countr_zero(left)], 4);
                all &= value | ~0ull << 32;
            }
        } else {
            all = 0;
        }
        if (all != kAll)
            for (uint64_t left = lanes; left; left &= left - 1) {
                const int lane = std::countr_zero(left);
                for (uint32_t b = 0; b < bytes; ++b)
                    if (!defined[address[lane] + b] && dword + b / 4 < 16)
                        st.loaded[dword + b / 4] &= ~(1ull << lane);
            }
    }
    if (access == Access::load) return;
    const bool atomic = access == Access::atomic;
    uint64_t whole = kAll;
    if (atomic) {  // the result is defined when both memory and data are
        whole = data_defined(st, inst, 0, 0, true);
        for (uint32_t k = 0; k < count && dword + k < 16; ++k) whole &= st.loaded[dword + k];
    } else {
        whole = data_defined(st, inst, dword, count, false);
    }
    if ((lanes & ~whole) == 0) {
        auto mark = [&](auto ones) {
            for (uint64_t left = lanes; left; left &= left - 1)
                std::memcpy(defined + address[std::countr_zero(left)], &ones, sizeof ones);
        };
        if (bytes == 16)
            mark(Pair{kAll, kAll});
        else if (bytes == 8)
            mark(kAll);
        else if (bytes == 4)
            mark(~0u);
        else
            for (uint64_t left = lanes; left; left &= left - 1)
                std::memset(defined + address[std::countr_zero(left)], 0xff, bytes);
        return;
    }
    for (uint32_t k = 0; k < count; ++k) {
        const uint64_t good = atomic ? whole : data_defined(st, inst, dword + k, 1, false);
        for (uint64_t left = lanes; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            std::memset(defined + address[lane] + 4 * k, good >> lane & 1 ? 0xff : 0,
                        std::min(4u, bytes - 4 * k));
        }
    }
}

void Checker::lds_dma(Wave& wave, const Inst& inst, uint32_t lds_address, uint64_t lanes) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    if (!c.lds_ready) c.make_lds();
    if (lds_address % 4) {
        c.report(wave, inst, "misaligned", [&] {
            return to_string(inst) + " writes LDS from byte " + hex(lds_address) +
                   " on (m0 + offset)";
        });
        return;
    }
    uint32_t address[kLanes];
    uint64_t outside = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
        address[lane] = lds_address + 4 * static_cast<uint32_t>(lane);
        if (address[lane] + 4ull > c.lds_bytes) outside |= 1ull << lane;
    }
    outside &= lanes;
    if (outside) {
        c.outside_lds(wave, inst, " writes", address, outside);
        lanes &= ~outside;
    }
    if (!lanes) return;
    st.dma_op = c.races.new_dma_op(wave, inst);
    c.races.access(wave, st, inst, address, lanes, 4, Use::dma, st.dma_op);
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        std::memset(c.lds_defined.data() + address[lane], st.loaded[0] >> lane & 1 ? 0xff : 0, 4);
    }
}

}  // namespace emulator
