// Accesses to global, private and constant memory: bounds, alignment, and definedness.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "check/checker_impl.h"
#include "check/undefined.h"
#include "isa/text.h"

namespace emulator {

uint64_t Checker::global_access(Wave& wave, const Inst& inst, const uint64_t* address,
                                uint64_t lanes, uint32_t bytes, Access access, uint32_t dword) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    const uint64_t inside = c.memory.inside(address, lanes, bytes);
    if (inside != lanes) {
        const uint64_t bad = lanes & ~inside;
        const int lane = std::countr_zero(bad);
        c.report(wave, inst, "out of bounds", [&] {
            return to_string(inst) + (access == Access::load ? " loads " : " stores ") +
                   std::to_string(bytes) + " bytes at " + hex(address[lane]) + " in " +
                   lanes_text(bad) + ", which lie in no allocation";
        });
        lanes = inside;
    }
    if (access != Access::load) {
        const uint64_t writable = c.memory.writable(address, lanes, bytes);
        if (writable != lanes) {
            const uint64_t bad = lanes & ~writable;
            c.report(wave, inst, "store to constant memory", [&] {
                return to_string(inst) + " stores " + std::to_string(bytes) + " bytes at " +
                       hex(address[std::countr_zero(bad)]) + " in " + lanes_text(bad) +
                       ": code, constants, kernel arguments and packets are read only";
            });
            lanes = writable;
        }
    }
    if (access == Access::atomic) lanes &= ~c.misaligned(wave, inst, " at ", address, lanes, bytes);
    if (!lanes) return 0;
    if (c.accesses) c.accesses->note(wave, inst, address, lanes, bytes, access, dword);
    const uint32_t count = (bytes + 3) / 4;
    if (access != Access::store) {
        const uint64_t written = c.memory.written(address, lanes, bytes);
        if (written != lanes)
            for (uint64_t left = lanes & ~written; left; left &= left - 1) {
                const int lane = std::countr_zero(left);
                for (uint32_t k = 0; k < count && dword + k < 16; ++k)
                    if (!c.memory.written(address[lane] + 4 * k, std::min(4u, bytes - 4 * k)))
                        st.loaded[dword + k] &= ~(1ull << lane);
            }
    }
    if (access != Access::load) {
        const bool atomic = access == Access::atomic;
        if ((lanes & ~data_defined(st, inst, dword, count, atomic)) != 0) {
            const Operand& data = inst.src[1];
            const int first = atomic ? 0 : static_cast<int>(dword);
            const int last = atomic ? data.dwords : static_cast<int>(dword + count);
            for (int k = first; k < last && k < data.dwords; ++k)
                need_vector(c.report, wave, st, inst, data.index + k, lanes, "data to store");
        }
    }
    return lanes;
}

uint64_t Checker::scratch_access(Wave& wave, const Inst& inst, const uint32_t* address,
                                 uint64_t lanes, uint32_t bytes, Access access, uint32_t dword) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    uint64_t outside = 0;
    bool same = true;
    const uint32_t first = lanes ? address[std::countr_zero(lanes)] : 0;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        same &= address[lane] == first;
        if (static_cast<uint64_t>(address[lane]) + bytes > wave.scratch_bytes)
            outside |= 1ull << lane;
    }
    if (outside) {
        c.report(wave, inst, "out of bounds", [&] {
            return to_string(inst) + " accesses private byte " +
                   hex(address[std::countr_zero(outside)]) + " in " + lanes_text(outside) +
                   "; a lane has " + std::to_string(wave.scratch_bytes) + " bytes";
        });
        lanes &= ~outside;
    }
    if (!lanes) return 0;
    if (st.scratch.size() < wave.scratch_bytes) st.scratch.resize(wave.scratch_bytes, 0);
    const bool atomic = access == Access::atomic;
    auto move = [&](uint32_t from, uint64_t who) {
        for (uint32_t b = 0; b < bytes; ++b) {
            uint64_t& known = st.scratch[from + b];
            const uint32_t k = dword + b / 4;
            if (access != Access::store && k < 16) st.loaded[k] &= ~who | known;
            if (access != Access::load) {
                const uint64_t good = data_defined(st, inst, k, 1, atomic);
                known = (known & ~who) | (atomic ? known & good & who : good & who);
            }
        }
    };
    if (same) {
        move(first, lanes);
    } else {
        for (uint64_t left = lanes; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            move(address[lane], 1ull << lane);
        }
    }
    return lanes;
}

bool Checker::scalar_access(Wave& wave, const Inst& inst, uint64_t address, uint32_t dwords,
                            uint32_t dword) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    if (address % 4)
        c.report(wave, inst, "misaligned", [&] {
            return to_string(inst) + " at " + hex(address) + ": the two low bits are ignored";
        });
    address &= ~3ull;
    if (!c.memory.contains(address, 4ull * dwords)) {
        c.report(wave, inst, "out of bounds", [&] {
            return to_string(inst) + " loads " + std::to_string(4 * dwords) + " bytes at " +
                   hex(address) + ", which lie in no allocation";
        });
        return false;
    }
    if (c.accesses) c.accesses->note_scalar(wave, inst, address, 4ull * dwords);
    if (!c.memory.written(address, 4ull * dwords))
        for (uint32_t k = 0; k < dwords && dword + k < 16; ++k)
            if (!c.memory.written(address + 4 * k, 4)) st.loaded[dword + k] = 0;
    return true;
}

}  // namespace emulator
