#include "check/lds_races.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "isa/text.h"

namespace emulator {
namespace {

// An LDS operation in the tables below: its number << 5 | its wave, or kShared for "several waves".
constexpr uint32_t kWaveMask = 31, kShared = 31, kNobody = 30;
constexpr uint32_t kSplit = 0x7fffffff;  // a dword whose bytes are followed singly
constexpr size_t kMostOperations = 1u << 25;
constexpr size_t kHistory = 1u << 16;  // operations remembered before a full barrier clears them
constexpr uint32_t kEver = 0x3ffffff;  // every operation there will be

using Quad = int32_t __attribute__((vector_size(16)));
using Half = uint64_t __attribute__((vector_size(16)));

// The quick passes take four dwords at a time, in groups of Each neighbours: a ds_read_b128 of a
// wave is 64 steps of each.
template <int Each>
Quad take(const std::vector<uint32_t>& plane, const uint32_t* first) {
    Quad value;
    if constexpr (Each == 4) {
        std::memcpy(&value, &plane[first[0]], 16);
    } else if constexpr (Each == 2) {
        Half half;
        for (int k = 0; k < 2; ++k) {
            uint64_t pair;
            std::memcpy(&pair, &plane[first[k]], 8);
            half[k] = pair;
        }
        value = reinterpret_cast<Quad>(half);
    } else {
        for (int k = 0; k < 4; ++k) value[k] = static_cast<int32_t>(plane[first[k]]);
    }
    return value;
}

template <int Each>
void give(std::vector<uint32_t>& plane, const uint32_t* first, Quad value) {
    if constexpr (Each == 4) {
        std::memcpy(&plane[first[0]], &value, 16);
    } else if constexpr (Each == 2) {
        const Half half = reinterpret_cast<Half>(value);
        for (int k = 0; k < 2; ++k) {
            const uint64_t pair = half[k];
            std::memcpy(&plane[first[k]], &pair, 8);
        }
    } else {
        for (int k = 0; k < 4; ++k) plane[first[k]] = static_cast<uint32_t>(value[k]);
    }
}

Quad splat(uint32_t value) {
    const int32_t v = static_cast<int32_t>(value);
    return Quad{v, v, v, v};
}

// Entries that are neither ordered (below `safe`) nor of wave `me`.
Quad foreign(Quad value, Quad limit, Quad me) {
    return (value > limit) & ((value & splat(kWaveMask)) != me);
}

bool any(Quad value) { return (value[0] | value[1] | value[2] | value[3]) != 0; }

// True when no dword's entry is foreign; kNobody as `me` excepts no wave.
template <int Each>
bool clear(const std::vector<uint32_t>& plane, const uint32_t* dword, int count, uint32_t safe,
           uint32_t me) {
    Quad bad = {};
    const Quad limit = splat(safe - 1), who = splat(me);
    for (int g = 0; g < count; g += 4 / Each)
        bad |= foreign(take<Each>(plane, dword + g), limit, who);
    return !any(bad);
}

}  // namespace

void LdsRaces::make(size_t bytes) { dwords_.make((bytes + 3) / 4 + 4, group_.waves.size()); }

void LdsRaces::make_bytes() {
    bytes_ready_ = true;
    bytes_.make(dwords_.write.size() * 4, group_.waves.size());
    if (atomics_ready_) bytes_.make_atomics(group_.waves.size());
}

void LdsRaces::make_atomics() {
    atomics_ready_ = true;
    dwords_.make_atomics(group_.waves.size());
    if (bytes_ready_) bytes_.make_atomics(group_.waves.size());
}

uint32_t LdsRaces::new_op(std::vector<Operation>& ops, const Wave& wave, const Inst& inst) {
    if (ops.size() > kMostOperations)
        throw std::length_error(
            "more than 2^25 LDS operations of a workgroup without a "
            "barrier that orders them");
    ops.push_back({wave.id, &inst});
    return static_cast<uint32_t>(ops.size() - 1);
}

uint32_t LdsRaces::new_lds_op(const Wave& wave, State& st, const Inst& inst) {
    if (!st.lds_op) st.lds_op = new_op(lds_ops_, wave, inst);
    return st.lds_op;
}

uint32_t LdsRaces::new_dma_op(const Wave& wave, const Inst& inst) {
    return new_op(dma_ops_, wave, inst);
}

// When everything so far is ordered before everything to come, its history may go: a long
// kernel's would fill the numbers, and 24 bytes each of memory.
void LdsRaces::forget(bool lds, bool dma) {
    auto clear_all = [](std::vector<uint32_t>& plane) { std::fill(plane.begin(), plane.end(), 0); };
    for (Planes* planes : {&dwords_, &bytes_}) {
        if (dma) clear_all(planes->dma);
        if (!lds) continue;
        for (uint32_t& code : planes->write) code = code == kSplit ? kSplit : 0;
        clear_all(planes->read);
        clear_all(planes->atomic);
        for (auto& plane : planes->reads) clear_all(plane);
        for (auto& plane : planes->atomics) clear_all(plane);
    }
    if (lds) lds_ops_.resize(1);
    if (dma) dma_ops_.resize(1);
    for (auto& st : states_) {
        if (!st || st->ended) continue;
        if (lds) st->in_flight.retired_lds = st->arrived_lds = st->passed_lds = 0;
        if (dma) st->in_flight.retired_dma = st->arrived_dma = st->passed_dma = 0;
    }
}

// The earlier operation that an access of wave `me` to one unit is not ordered after.
LdsRaces::Conflict LdsRaces::unordered(const Planes& p, size_t unit, Use use, const State& mine,
                                       uint16_t me) const {
    auto late = [&](uint32_t code, size_t wave) {
        if (code < safe_lds_ || code == kSplit) return false;
        if (wave == me) return use == Use::dma && code >> 5 > mine.in_flight.retired_lds;
        return code >> 5 > states_[wave]->passed_lds;
    };
    const uint32_t write = p.write[unit];
    if (late(write, write & kWaveMask))
        return {write >> 5, false, "written", (write & kWaveMask) == me, true};
    const uint32_t dma = p.dma[unit], number = dma >> 5;
    if (dma >= safe_dma_) {
        const uint32_t wave = dma & kWaveMask;
        if (wave != me && number > states_[wave]->passed_dma)
            return {number, true, "written", false};
        if (wave == me && use != Use::dma && number > mine.in_flight.retired_dma)
            return {number, true, "written", true};
    }
    if (atomics_ready_ && use != Use::atomic && p.atomic[unit] >= safe_lds_)
        for (size_t w = 0; w < p.atomics.size(); ++w)
            if (late(p.atomics[w][unit], w))
                return {p.atomics[w][unit] >> 5, false, "changed", w == me};
    if (use != Use::read && p.read[unit] >= safe_lds_)
        for (size_t w = 0; w < p.reads.size(); ++w)
            if (late(p.reads[w][unit], w)) return {p.reads[w][unit] >> 5, false, "read", w == me};
    return {};
}

// `code` over what the unit's table says so far.
uint32_t LdsRaces::joined(uint32_t before, uint32_t code) const {
    const bool shared = before >= safe_lds_ && ((before ^ code) & kWaveMask) != 0;
    return shared ? code | kShared : code;
}

void LdsRaces::record(Planes& p, size_t unit, Use use, uint32_t code, uint16_t me) {
    switch (use) {
        case Use::read:
            p.read[unit] = joined(p.read[unit], code);
            p.reads[me][unit] = code;
            break;
        case Use::write:
            p.write[unit] = code;
            break;
        case Use::dma:
            p.dma[unit] = code;
            break;
        case Use::atomic:
            p.atomic[unit] = p.atomics[me][unit] = code;
            break;
    }
}

void LdsRaces::race(const Wave& wave, const Inst& inst, int lane, uint32_t address, Use use,
                    const Conflict& found) {
    const Operation& op = (found.dma ? dma_ops_ : lds_ops_)[found.op];
    if (raced_) return;  // one occurrence per access, however many lanes
    raced_ = true;
    const bool before_barrier = found.op < (found.dma ? released_dma_ : released_lds_);
    const char* verb = use == Use::read ? "reads" : use == Use::atomic ? "changes" : "writes";
    report_(wave, inst, "LDS race", [&] {
        std::string text = "wave " + std::to_string(wave.id) + " lane " + std::to_string(lane) +
                           " " + verb + " LDS byte " + hex(address) + " (" + to_string(inst) +
                           "), which ";
        text += found.own ? "it has" : "wave " + std::to_string(op.wave) + " has";
        text += std::string(" ") + found.did + " by " + to_string(*op.inst) + " at +" +
                hex(op.inst->offset) + " ";
        if (found.own)
            text += std::string("and not waited for (") + (found.dma ? "vmcnt" : "lgkmcnt") + ")";
        else if (before_barrier)
            text += std::string("without waiting for it (") + (found.dma ? "vmcnt" : "lgkmcnt") +
                    ") before the barrier that both passed";
        else
            text += "since; no barrier lies between";
        return text;
    });
}

void LdsRaces::split(size_t dword) {
    if (!bytes_ready_) make_bytes();
    for (size_t b = dword * 4; b < dword * 4 + 4; ++b) {
        bytes_.write[b] = dwords_.write[dword];
        bytes_.dma[b] = dwords_.dma[dword];
        bytes_.read[b] = dwords_.read[dword];
        for (size_t w = 0; w < dwords_.reads.size(); ++w)
            bytes_.reads[w][b] = dwords_.reads[w][dword];
        if (!atomics_ready_) continue;
        bytes_.atomic[b] = dwords_.atomic[dword];
        for (size_t w = 0; w < dwords_.atomics.size(); ++w)
            bytes_.atomics[w][b] = dwords_.atomics[w][dword];
    }
    dwords_.write[dword] = kSplit;
}

// True when a lane of a store writes what LDS holds already: `count` bytes at `from`, the
// lane's bytes begin at `address` with data register `dword`.
bool LdsRaces::same_bytes(const Wave& wave, const Inst& inst, int lane, uint32_t address,
                          uint32_t dword, uint32_t from, uint32_t count) const {
    const Operand& data = dword < inst.src[1].dwords ? inst.src[1] : inst.src[2];
    const uint32_t row = data.index + dword - (&data == &inst.src[2] ? inst.src[1].dwords : 0u);
    const uint32_t skip = std::strstr(inst.name, "_d16_hi") ? 2 : 0;
    for (uint32_t b = from; b < from + count; ++b) {
        const uint32_t at = b - address + skip;
        const uint8_t byte = static_cast<uint8_t>(wave.v[row + at / 4][lane] >> at % 4 * 8);
        if (group_.lds[b] != byte) return false;
    }
    return true;
}

// One lane's access, exact.
void LdsRaces::access_slow(const Wave& wave, State& st, const Inst& inst, int lane,
                           uint32_t address, uint32_t size, Use use, uint32_t code, uint32_t data) {
    const uint32_t end = address + size;
    auto harmless = [&](const Conflict& found, uint32_t from, uint32_t count) {
        return use == Use::write && found.stored &&
               same_bytes(wave, inst, lane, address, data, from, count);
    };
    for (uint32_t dword = address / 4; dword * 4 < end; ++dword) {
        const uint32_t from = std::max(address, dword * 4), to = std::min(end, dword * 4 + 4);
        const bool whole = to - from == 4;
        if (!whole && dwords_.write[dword] != kSplit) split(dword);
        if (dwords_.write[dword] != kSplit) {
            const Conflict found = unordered(dwords_, dword, use, st, wave.id);
            if (found.op && !harmless(found, from, to - from))
                race(wave, inst, lane, from, use, found);
            record(dwords_, dword, use, code, wave.id);
            continue;
        }
        for (uint32_t b = from; b < to; ++b) {
            const Conflict found = unordered(bytes_, b, use, st, wave.id);
            if (found.op && !harmless(found, b, 1)) race(wave, inst, lane, b, use, found);
            record(bytes_, b, use, code, wave.id);
        }
        if (whole && use == Use::write) dwords_.write[dword] = code;  // one owner again
    }
}

// False when the access needs the exact check.
template <int Each>
bool LdsRaces::access_quick(const uint32_t* dword, int count, Use use, uint32_t code, uint16_t me) {
    if (atomics_ready_ && use != Use::atomic &&
        !clear<Each>(dwords_.atomic, dword, count, safe_lds_, kNobody))
        return false;
    constexpr int step = 4 / Each;
    const Quad value = splat(code), who = splat(me), limit = splat(safe_lds_ - 1);
    if (use == Use::read) {
        Quad bad = {};
        const Quad dma_limit = splat(safe_dma_ - 1), nobody = splat(kNobody);
        for (int g = 0; g < count; g += step) {
            const uint32_t* first = dword + g;
            bad |= foreign(take<Each>(dwords_.write, first), limit, who);
            bad |= foreign(take<Each>(dwords_.dma, first), dma_limit, nobody);
            const Quad shared = foreign(take<Each>(dwords_.read, first), limit, who);
            give<Each>(dwords_.read, first, value | (shared & splat(kShared)));
            give<Each>(dwords_.reads[me], first, value);
        }
        return !any(bad);  // the exact check records the same once more
    }
    const uint32_t own = use == Use::dma ? kNobody : me;
    if (!clear<Each>(dwords_.write, dword, count, safe_lds_, own) ||
        !clear<Each>(dwords_.read, dword, count, safe_lds_, own) ||
        !clear<Each>(dwords_.dma, dword, count, safe_dma_, use == Use::dma ? me : kNobody))
        return false;
    for (int g = 0; g < count; g += step) {
        const uint32_t* first = dword + g;
        if (use == Use::write) give<Each>(dwords_.write, first, value);
        if (use == Use::dma) give<Each>(dwords_.dma, first, value);
        if (use != Use::atomic) continue;
        give<Each>(dwords_.atomic, first, value);
        give<Each>(dwords_.atomics[me], first, value);
    }
    return true;
}

void LdsRaces::access(const Wave& wave, State& st, const Inst& inst, const uint32_t* address,
                      uint64_t lanes, uint32_t size, Use use, uint32_t number, uint32_t data) {
    const uint32_t code = number << 5 | wave.id;
    if (use == Use::atomic && !atomics_ready_) make_atomics();
    uint32_t merged = size;
    uint32_t dword[kLanes];
    int count = 0;
    if (lanes == kAll) {
        for (int lane = 0; lane < kLanes; ++lane) {
            merged |= address[lane];
            dword[lane] = address[lane] / 4;
        }
        count = kLanes;
    } else {
        for (uint64_t left = lanes; left; left &= left - 1) {
            const uint32_t at = address[std::countr_zero(left)];
            merged |= at;
            dword[count++] = at / 4;
        }
    }
    bool done = false;
    raced_ = false;
    if (merged % 4 == 0) {
        while (count % 4) {  // fill up with the first: once more changes nothing
            dword[count] = dword[0];
            ++count;
        }
        if (size == 4) done = access_quick<1>(dword, count, use, code, wave.id);
        if (size == 8) done = access_quick<2>(dword, count, use, code, wave.id);
        if (size == 16) done = access_quick<4>(dword, count, use, code, wave.id);
    }
    if (done) return;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        access_slow(wave, st, inst, lane, address[lane], size, use, code, data);
    }
}

void LdsRaces::arrive(State& st) {
    st.arrived_lds = st.in_flight.retired_lds;
    st.arrived_dma = st.in_flight.retired_dma;
    st.front_lds = st.in_flight.first_lds();
    st.front_dma = st.in_flight.first_dma();
}

void LdsRaces::release() {
    const auto all_lds = static_cast<uint32_t>(lds_ops_.size());
    const auto all_dma = static_cast<uint32_t>(dma_ops_.size());
    uint32_t safe_lds = all_lds, safe_dma = all_dma;
    for (const Wave* wave : group_.waves) {
        State& st = *states_[wave->id];
        st.passed_lds = st.arrived_lds;
        st.passed_dma = st.arrived_dma;
        if (st.front_lds) safe_lds = std::min(safe_lds, st.front_lds);
        if (st.front_dma) safe_dma = std::min(safe_dma, st.front_dma);
    }
    const bool forget_lds = all_lds > kHistory && safe_lds == all_lds;
    const bool forget_dma = all_dma > kHistory && safe_dma == all_dma;
    if (forget_lds || forget_dma) forget(forget_lds, forget_dma);
    released_lds_ = forget_lds ? 1 : all_lds;
    released_dma_ = forget_dma ? 1 : all_dma;
    safe_lds_ = (forget_lds ? 1 : safe_lds) << 5;
    safe_dma_ = (forget_dma ? 1 : safe_dma) << 5;
}

// s_endpgm waits for everything, and the barriers of the others no longer wait for this wave.
void LdsRaces::end(State& st) {
    st.in_flight.retired_lds = st.in_flight.retired_dma = st.arrived_lds = st.arrived_dma = kEver;
    st.front_lds = st.front_dma = 0;
}

}  // namespace emulator
