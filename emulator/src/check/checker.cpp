// The proofs made while a workgroup runs, whatever order its waves happen to run in.
//
// 1. Registers in flight. A load's destination may be neither read nor overwritten before an
//    s_waitcnt retired the load. vmcnt and the LDS part of lgkmcnt retire in order of issue, so
//    that a later load of the same queue may overwrite; scalar loads return in any order, so that
//    only lgkmcnt(0) retires them; flat operations take part in both counters and in the order of
//    neither: only zeros retire them. Loads in flight at s_endpgm are no hazard: it waits for
//    everything. Registers that M0 chooses (s_set_gpr_idx_*, s_movrel*) are those that it chooses.
// 2. LDS races. Each operation on LDS has a number. What wave w did with number n is ordered before
//    an access by another wave when w had retired n (lgkmcnt; vmcnt for LDS-DMA) at its arrival at
//    the last barrier that both passed. Of writes, atomics and reads of one place at least one
//    being a write (or a plain access against an atomic), unordered ones are a race; bytes count,
//    so that neighbouring bytes of a dword do not. A wave's own LDS operations are in order among
//    themselves, but LDS-DMA is not with them: its data needs vmcnt before a ds_read, and what it
//    overwrites must have been read. Stores of the same bytes by several waves are none: compilers
//    let all waves that hold a copy of a value store it.
// 3. Global, scratch and LDS accesses outside of their allocation; misaligned ones that fault;
//    stores to code and to other memory that kernels may only read. Races between workgroups:
//    global_races.h.
// 4. Undefined values, followed per register and lane (per bit in scalar registers, per byte in LDS
//    and memory) and reported where they matter: addresses, data stored to global memory, scalar
//    control, EXEC. Copying, spilling or computing with them is allowed.
// 5. Barriers that not all waves of the workgroup reach.
#include "check/checker.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "isa/decode.h"
#include "machine/memory.h"

namespace emulator {
namespace {

constexpr int kScc = kScalarRegisters;  // pseudo register of the definedness tables
constexpr int kWords = (kVectorRegisters + kScalarRegisters) / 64;
// An LDS operation in the tables below: its number << 5 | its wave, or kShared for "several waves".
constexpr uint32_t kWaveMask = 31, kShared = 31, kNobody = 30;
constexpr uint32_t kSplit = 0x7fffffff;  // a dword whose bytes are followed singly
constexpr uint64_t kAll = ~0ull;
constexpr size_t kMostOperations = 1u << 25;
constexpr size_t kHistory = 1u << 16;  // operations remembered before a full barrier clears them

// How definedness flows through an instruction.
enum class Rule : uint8_t {
    none,        // nothing read or written that matters
    vector,      // lane by lane: defined when all sources are
    compare,     // the same into a lane mask
    select,      // v_cndmask: by the chosen source
    first_lane,  // v_readfirstlane
    read_lane,
    write_lane,
    matrix,  // all or nothing
    permute,
    bpermute,
    swizzle,
    scalar,  // all or nothing
    copy,
    negate,  // bit by bit
    bit_and,
    bit_or,
    bit_andn2,
    bit_orn2,
    bit_xor,
    shift_left,
    shift_right,
    choose,    // s_cselect
    test_bit,  // s_bitcmp
    branch_scc,
    branch_vcc,
    branch_exec,
    jump,
    memory,  // VMEM and DS with addresses
    scalar_memory,
};

// Which halves of 64-bit sources the halves of a 64-bit result come from. Compilers leave the half
// of a register pair undefined that does not matter, as in a 64-bit multiply-add for its low half.
enum class Halves : uint8_t {
    both,
    upwards,    // sums, products, left shifts: the low half of the low ones only
    downwards,  // right shifts: the high half of the high ones only
    apart,      // moves
    packed,     // two floats, chosen by op_sel and op_sel_hi
};

struct Touch {
    uint8_t word;
    uint64_t mask;
};

// What the checks need to know of an instruction, made when it is first executed.
struct Info {
    Rule rule = Rule::none;
    Halves halves = Halves::both;
    bool load = false, store = false, dma = false, flat = false, counts_vm = false,
         counts_ds = false, counts_smem = false;
    bool saves_exec = false;  // s_*_saveexec
    bool indexed = false;     // its vector operands move with s_set_gpr_idx_on
    bool relative = false;    // s_movrel*: its operand's number counts from M0
    bool simple = false;      // vector rule with plain operands
    std::vector<Touch> touches;
    std::vector<uint16_t> vector_src, scalar_src, mask_src;  // registers; masks are scalar pairs
    std::vector<uint16_t> vector_dst, scalar_dst;
    int mask_dst = -1;
};

bool starts(std::string_view text, std::string_view with) {
    return text.substr(0, with.size()) == with;
}
bool ends(std::string_view text, std::string_view with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
}

std::string register_name(bool vector, int index) {
    if (vector) return (index >= 256 ? "a" : "v") + std::to_string(index & 255);
    switch (index) {
        case 102:
            return "flat_scratch_lo";
        case 103:
            return "flat_scratch_hi";
        case kVcc:
            return "vcc_lo";
        case kVcc + 1:
            return "vcc_hi";
        case kM0:
            return "m0";
        case kExec:
            return "exec_lo";
        case kExec + 1:
            return "exec_hi";
        case kScc:
            return "scc";
        default:
            return index >= 108 ? "ttmp" + std::to_string(index - 108)
                                : "s" + std::to_string(index);
    }
}

std::string hex(uint64_t value) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

// "lane 3" or "lanes 0 to 15 (16)".
std::string lanes_text(uint64_t lanes) {
    const int first = std::countr_zero(lanes), last = 63 - std::countl_zero(lanes);
    if (first == last) return "lane " + std::to_string(first);
    return "lanes " + std::to_string(first) + " to " + std::to_string(last) + " (" +
           std::to_string(std::popcount(lanes)) + ")";
}

Rule scalar_rule(std::string_view name) {
    // Without width suffix where both widths behave alike.
    std::string_view stem = name.substr(0, name.rfind('_'));
    if (ends(stem, "_saveexec")) stem = stem.substr(0, stem.size() - 9);
    if (ends(stem, "_wrexec")) stem = stem.substr(0, stem.size() - 7);
    if (name == "s_mov_b32" || name == "s_mov_b64" || name == "s_movk_i32") return Rule::copy;
    if (stem == "s_not") return Rule::negate;
    if (stem == "s_and" || stem == "s_nand") return Rule::bit_and;
    if (stem == "s_or" || stem == "s_nor") return Rule::bit_or;
    if (stem == "s_andn2" || stem == "s_andn1") return Rule::bit_andn2;
    if (stem == "s_orn2" || stem == "s_orn1") return Rule::bit_orn2;
    if (stem == "s_xor" || stem == "s_xnor") return Rule::bit_xor;
    if (stem == "s_lshl") return Rule::shift_left;
    if (stem == "s_lshr") return Rule::shift_right;
    if (stem == "s_cselect") return Rule::choose;
    if (starts(name, "s_bitcmp")) return Rule::test_bit;
    return Rule::scalar;
}

Halves halves_of(const Inst& inst) {
    const std::string_view name = inst.name;
    if (inst.dpp || inst.dst[0].dwords != 2) return Halves::both;
    for (const char* up : {"v_mad_u64_u32", "v_mad_i64_i32", "v_lshl_add_u64", "v_lshlrev_b64"})
        if (name == up) return Halves::upwards;
    if (name == "v_lshrrev_b64" || name == "v_ashrrev_i64") return Halves::downwards;
    if (name == "v_mov_b64") return Halves::apart;
    if (inst.dst[0].type == Type::pkf32 || name == "v_pk_mov_b32") return Halves::packed;
    return Halves::both;
}

Info describe(const Inst& inst) {
    Info info;
    const std::string_view name = inst.name;
    auto touch = [&](int bit) {
        const uint8_t word = static_cast<uint8_t>(bit / 64);
        for (Touch& t : info.touches)
            if (t.word == word) {
                t.mask |= 1ull << bit % 64;
                return;
            }
        info.touches.push_back({word, 1ull << bit % 64});
    };
    auto touch_scalar = [&](int index) {
        if (index < kScalarRegisters) touch(kVectorRegisters + index);
    };
    auto scalars = [&](std::vector<uint16_t>& list, int first, int count) {
        for (int r = first; r < first + count && r < kScalarRegisters; ++r) {
            list.push_back(static_cast<uint16_t>(r));
            touch_scalar(r);
        }
    };
    auto vectors = [&](std::vector<uint16_t>& list, int first, int count) {
        for (int r = first; r < first + count && r < kVectorRegisters; ++r) {
            list.push_back(static_cast<uint16_t>(r));
            touch(r);
        }
    };

    for (const Operand& src : inst.src) {
        if (src.kind == Kind::vector) {
            vectors(info.vector_src, src.index, src.dwords);
        } else if (src.kind == Kind::scalar) {
            if (src.type == Type::m64 && inst.format >= Format::vop1) {
                info.mask_src.push_back(src.index);
                touch_scalar(src.index);
                touch_scalar(src.index + 1);
            } else {
                scalars(info.scalar_src, src.index, src.dwords);
            }
        } else if (src.kind == Kind::special) {
            if (src.index == 253) info.scalar_src.push_back(kScc);
            if (src.index == 251) scalars(info.scalar_src, kVcc, 2);
        }
    }
    for (const Operand& dst : inst.dst) {
        if (dst.kind == Kind::vector) {
            vectors(info.vector_dst, dst.index, dst.dwords);
        } else if (dst.kind == Kind::scalar) {
            if (dst.type == Type::m64 && inst.format >= Format::vop1) {
                info.mask_dst = dst.index;
                touch_scalar(dst.index);
                touch_scalar(dst.index + 1);
            } else {
                scalars(info.scalar_dst, dst.index, dst.dwords);
            }
        }
    }
    if (inst.reads_scc) info.scalar_src.push_back(kScc);
    if (inst.writes_scc) info.scalar_dst.push_back(kScc);

    switch (inst.unit) {
        case Unit::wait:
        case Unit::barrier:
            break;
        case Unit::branch:
            if (starts(name, "s_cbranch_scc")) {
                info.rule = Rule::branch_scc;
            } else if (starts(name, "s_cbranch_vcc")) {
                info.rule = Rule::branch_vcc;
                touch_scalar(kVcc);
                touch_scalar(kVcc + 1);
            } else if (starts(name, "s_cbranch_exec")) {
                info.rule = Rule::branch_exec;
            } else if (!info.scalar_src.empty() || !info.scalar_dst.empty()) {
                info.rule = Rule::jump;
            }
            break;
        case Unit::salu:
            info.saves_exec = name.find("saveexec") != std::string_view::npos;
            info.relative = starts(name, "s_movrel");
            if (info.relative) touch_scalar(kM0);
            info.rule = scalar_rule(name);
            if (inst.reads_dst)
                for (uint16_t r : info.scalar_dst)
                    if (r != kScc) info.scalar_src.push_back(r);
            if (info.scalar_src.empty() && info.scalar_dst.empty()) info.rule = Rule::none;
            break;
        case Unit::smem:
            info.counts_smem = !info.scalar_dst.empty();
            info.rule = info.scalar_src.empty() && info.scalar_dst.empty() ? Rule::none
                                                                           : Rule::scalar_memory;
            break;
        case Unit::mfma:
            info.rule = Rule::matrix;
            break;
        case Unit::valu:
        case Unit::trans:
            if (name == "v_readfirstlane_b32")
                info.rule = Rule::first_lane;
            else if (name == "v_readlane_b32")
                info.rule = Rule::read_lane;
            else if (name == "v_writelane_b32")
                info.rule = Rule::write_lane;
            else if (starts(name, "v_cndmask_b32") && !inst.sdwa && !inst.dpp)
                info.rule = Rule::select;
            else if (starts(name, "v_cmp"))
                info.rule = Rule::compare;
            else if (info.vector_dst.empty() && info.scalar_dst.empty() && info.mask_dst < 0)
                info.rule = Rule::none;
            else
                info.rule = Rule::vector;
            if (inst.reads_dst && info.rule == Rule::vector && !inst.dpp)
                info.vector_src.insert(info.vector_src.end(), info.vector_dst.begin(),
                                       info.vector_dst.end());
            info.indexed = info.rule != Rule::first_lane && info.rule != Rule::read_lane &&
                           info.rule != Rule::write_lane;
            if (info.rule == Rule::vector) info.halves = halves_of(inst);
            info.simple = info.rule == Rule::vector && info.halves == Halves::both && !inst.dpp &&
                          info.mask_src.empty() && info.mask_dst < 0 && info.scalar_dst.empty();
            break;
        case Unit::ds:
            info.rule = Rule::memory;
            if (name == "ds_nop") {
                info.rule = Rule::none;
                break;
            }
            if (name == "ds_permute_b32") info.rule = Rule::permute;
            if (name == "ds_bpermute_b32") info.rule = Rule::bpermute;
            if (name == "ds_swizzle_b32") info.rule = Rule::swizzle;
            info.counts_ds = true;
            info.load = !info.vector_dst.empty();
            info.store = inst.src[1].dwords != 0 && info.rule == Rule::memory;
            if (name.find("addtid") != std::string_view::npos || name == "ds_append" ||
                name == "ds_consume")
                scalars(info.scalar_src, kM0, 1);
            break;
        case Unit::vmem:
            if (info.vector_src.empty() && info.scalar_src.empty() && info.vector_dst.empty())
                break;
            info.rule = Rule::memory;
            info.counts_vm = true;
            info.load = !info.vector_dst.empty();
            info.store = inst.src[1].dwords != 0;
            info.dma = inst.lds;
            info.flat = inst.format == Format::flat;
            info.counts_ds = info.flat;
            if (info.dma) scalars(info.scalar_src, kM0, 1);
            break;
    }
    return info;
}

// An operation that a counter still counts.
struct Flight {
    const Inst* inst = nullptr;
    uint32_t lds_op = 0;  // its number among the LDS (ds) or LDS-DMA (vm) operations, 0 for none
};

// A flat one is in both counters. Memory and LDS answer it independently of other operations.
struct Flat {
    const Inst* inst;
    uint32_t lds_op;
    bool vm_done, lgkm_done;
};

// First in, first out without moving elements.
class Queue {
   public:
    size_t size() const { return items_.size() - head_; }
    void push(Flight flight) {
        if (head_ > 64 && head_ * 2 > items_.size()) {
            items_.erase(items_.begin(), items_.begin() + static_cast<std::ptrdiff_t>(head_));
            head_ = 0;
        }
        items_.push_back(flight);
    }
    Flight pop() { return items_[head_++]; }
    const Flight* begin() const { return items_.data() + head_; }
    const Flight* end() const { return items_.data() + items_.size(); }
    Flight& back() { return items_.back(); }

   private:
    std::vector<Flight> items_;
    size_t head_ = 0;
};

constexpr uint32_t kEver = 0x3ffffff;  // every operation there will be

// One wave. Key: its id; owner: the checker.
struct State {
    uint64_t v[kVectorRegisters] = {};      // lanes that are defined
    uint32_t s[kScalarRegisters + 1] = {};  // bits that are defined; [kScc] all or none
    uint64_t flight[kWords] = {};           // registers that a load will write
    bool any_flight = false, twice = false;
    Queue vm, ds;
    std::vector<const Inst*> smem;
    std::vector<Flat> flats;
    uint64_t loaded[16] = {};         // lanes whose k-th loaded dword is defined
    uint32_t lds_op = 0, dma_op = 0;  // numbers of the instruction being executed
    // Numbers up to which this wave's LDS and DMA operations are retired: now, at its arrival at
    // the barrier, and at the last barrier that was released.
    uint32_t retired_lds = 0, retired_dma = 0, arrived_lds = 0, arrived_dma = 0, passed_lds = 0,
             passed_dma = 0;
    uint32_t front_lds = 0, front_dma = 0;  // first not retired at the arrival, 0 when all were
    uint64_t barriers = 0;
    bool ended = false;
    std::vector<uint64_t> scratch;  // defined lanes by byte of the private segment
};

struct Operation {
    uint16_t wave;
    bool atomic;
    const Inst* inst;
};

// Who last did what with a unit (dword or byte) of LDS: operations, 0 for never. `read` names the
// wave only when all reads that are not yet ordered are its own, so that a wave that works on data
// of its own between two barriers is told from sharing at a glance.
struct Planes {
    std::vector<uint32_t> write, dma, atomic, read;     // latest of any wave
    std::vector<std::vector<uint32_t>> reads, atomics;  // latest by wave
    void make(size_t units, size_t waves) {
        write.assign(units, 0);
        dma.assign(units, 0);
        read.assign(units, 0);
        reads.assign(waves, std::vector<uint32_t>(units, 0));
    }
    void make_atomics(size_t waves) {
        atomic.assign(write.size(), 0);
        atomics.assign(waves, std::vector<uint32_t>(write.size(), 0));
    }
};

using Quad = int32_t __attribute__((vector_size(16)));
using Half = uint64_t __attribute__((vector_size(16)));

enum class Use : uint8_t { read, write, dma, atomic };

}  // namespace

struct Checker::Impl {
    Workgroup& group;
    Memory& memory;
    Findings& findings;
    GlobalAccesses* accesses;
    const Code* code = nullptr;
    std::vector<std::unique_ptr<Info>> infos;
    std::vector<std::unique_ptr<State>> states;
    const Info* info = nullptr;                              // of the instruction being executed
    std::vector<std::pair<std::string, uint32_t>> reported;  // kind, byte offset
    Inst moved;  // the instruction being executed, with the registers that M0 chose, and its Info
    Info moved_info;

    // LDS
    bool lds_given = false;  // its contents were put there by the host
    bool lds_ready = false, bytes_ready = false, atomics_ready = false;
    size_t lds_bytes = 0;
    Planes dwords, bytes;
    std::vector<uint8_t> defined;                     // 0xff for each LDS byte that was written
    std::vector<Operation> lds_ops{{}}, dma_ops{{}};  // by number; 0 is none
    bool raced = false;
    uint32_t released_lds = 0, released_dma = 0;  // operations there were at the last barrier
    uint32_t safe_lds = 32, safe_dma = 32;  // table entries below are ordered before every access

    Impl(Workgroup& g, Memory& m, Findings& f, GlobalAccesses* a)
        : group(g), memory(m), findings(f), accesses(a) {}

    State& state(const Wave& wave) {
        if (wave.id >= states.size()) states.resize(wave.id + 1u);
        auto& slot = states[wave.id];
        if (!slot) {
            slot = std::make_unique<State>();
            slot->s[kExec] = slot->s[kExec + 1] = ~0u;
        }
        return *slot;
    }

    const Info& info_of(const Wave& wave, const Inst& inst) {
        if (code != wave.code) {
            code = wave.code;
            infos.clear();
            infos.resize(code ? code->insts.size() : 0);
        }
        if (inst.index >= infos.size()) infos.resize(inst.index + 1u);
        auto& slot = infos[inst.index];
        if (!slot) slot = std::make_unique<Info>(describe(inst));
        return *slot;
    }

    // Text is made for the first occurrence only; the others are counted.
    template <class Text>
    void report(const Wave& wave, const Inst& inst, const char* kind, Text&& text) {
        Finding finding;
        finding.kind = kind;
        finding.offset = inst.offset;
        finding.wave = wave.id;
        finding.workgroup = group.linear_id;
        const auto key = std::make_pair(std::string(kind), inst.offset);
        if (std::find(reported.begin(), reported.end(), key) == reported.end()) {
            reported.push_back(key);
            finding.detail = text();
        }
        findings.add(std::move(finding));
    }

    // ---- 1. registers in flight
    // --------------------------------------------------------------------

    static void mark(State& st, const Inst& inst, bool set) {
        const Operand& dst = inst.dst[0];
        if (!dst.dwords) return;
        const int first = dst.kind == Kind::scalar ? kVectorRegisters + dst.index : dst.index;
        for (int r = first; r < first + dst.dwords && r < kWords * 64; ++r) {
            if (set)
                st.flight[r / 64] |= 1ull << r % 64;
            else
                st.flight[r / 64] &= ~(1ull << r % 64);
        }
        if (set) st.any_flight = true;
    }

    static bool covers(const Inst& inst, int bit) {
        const Operand& dst = inst.dst[0];
        const int first = dst.kind == Kind::scalar ? kVectorRegisters + dst.index : dst.index;
        return bit >= first && bit < first + dst.dwords;
    }

    template <class F>
    static void each_flight(const State& st, F&& f) {
        for (const Flight& flight : st.vm) f(*flight.inst, "vmcnt");
        for (const Flight& flight : st.ds) f(*flight.inst, "lgkmcnt");
        for (const Inst* inst : st.smem) f(*inst, "lgkmcnt(0), scalar loads return in any order");
        for (const Flat& flat : st.flats) f(*flat.inst, "vmcnt and lgkmcnt(0)");
    }

    // After retiring: registers that another load in flight writes stay in flight.
    static void settle(State& st) {
        if (st.twice) {
            st.twice = false;
            each_flight(st, [&](const Inst& inst, const char*) {
                st.twice |= inst.dst[0].dwords != 0;
                mark(st, inst, true);
            });
        }
        uint64_t any = 0;
        for (uint64_t word : st.flight) any |= word;
        st.any_flight = any != 0;
    }

    // Whether two loads return in order of issue.
    static bool one_queue(const Inst& a, const Inst& b) {
        return a.unit == b.unit && (a.unit == Unit::vmem || a.unit == Unit::ds) &&
               a.format != Format::flat && b.format != Format::flat;
    }

    void check_flight(Wave& wave, State& st, const Inst& inst, const Info& in) {
        for (const Touch& touch : in.touches) {
            uint64_t hit = st.flight[touch.word] & touch.mask;
            for (; hit; hit &= hit - 1) {
                const int bit = touch.word * 64 + std::countr_zero(hit);
                const bool vector = bit < kVectorRegisters;
                const int index = vector ? bit : bit - kVectorRegisters;
                auto reads = [&](const std::vector<uint16_t>& list) {
                    return std::find(list.begin(), list.end(), index) != list.end();
                };
                bool read = reads(vector ? in.vector_src : in.scalar_src);
                if (!vector)
                    for (uint16_t mask : in.mask_src) read |= index == mask || index == mask + 1;
                if (!vector && in.rule == Rule::branch_vcc) read = true;
                if (!vector && in.relative && index == kM0) read = true;
                const Inst* by = nullptr;
                const char* wait = "";
                each_flight(st, [&](const Inst& other, const char* how) {
                    if (!covers(other, bit)) return;
                    if (!read && in.load && one_queue(inst, other)) {
                        st.twice = true;
                        return;
                    }
                    by = &other, wait = how;
                });
                if (!by) continue;
                report(wave, inst, "in-flight register", [&] {
                    return register_name(vector, index) + (read ? " is read" : " is overwritten") +
                           " by " + to_string(inst) + " while " + to_string(*by) + " at +" +
                           hex(by->offset) + " may still write it: no wait has retired it (" +
                           wait + ")";
                });
                if (in.load || in.counts_smem) st.twice = true;
                return;
            }
        }
    }

    void retire_vm(State& st, size_t left) {
        if (st.vm.size() <= left && (left || st.flats.empty())) return;
        while (st.vm.size() > left) {
            const Flight flight = st.vm.pop();
            if (flight.lds_op) st.retired_dma = flight.lds_op;
            mark(st, *flight.inst, false);
        }
        if (left == 0) {
            for (Flat& flat : st.flats) flat.vm_done = true;
            retire_flats(st);
        }
        settle(st);
    }

    void retire_flats(State& st) {
        for (size_t k = 0; k < st.flats.size();) {
            if (st.flats[k].vm_done && st.flats[k].lgkm_done) {
                mark(st, *st.flats[k].inst, false);
                st.flats.erase(st.flats.begin() + static_cast<std::ptrdiff_t>(k));
            } else {
                ++k;
            }
        }
    }

    void retire_lgkm(State& st, size_t left) {
        bool changed = false;
        uint32_t latest = st.retired_lds;
        while (st.ds.size() > left) {
            const Flight flight = st.ds.pop();
            if (flight.lds_op) latest = flight.lds_op;
            mark(st, *flight.inst, false);
            changed = true;
        }
        if (left == 0) {
            for (const Inst* inst : st.smem) mark(st, *inst, false);
            changed |= !st.smem.empty() || !st.flats.empty();
            st.smem.clear();
            for (Flat& flat : st.flats) {
                if (!flat.lgkm_done) latest = std::max(latest, flat.lds_op);
                flat.lgkm_done = true;
            }
            retire_flats(st);
        }
        // A number says that all before it are retired as well.
        for (const Flat& flat : st.flats)
            if (flat.lds_op && !flat.lgkm_done) latest = std::min(latest, flat.lds_op - 1);
        st.retired_lds = std::max(st.retired_lds, latest);
        if (changed) settle(st);
    }

    // ---- 2. LDS races
    // ----------------------------------------------------------------------------------

    void make_lds() {
        lds_ready = true;
        lds_bytes = group.lds.size();
        dwords.make((lds_bytes + 3) / 4 + 4, group.waves.size());
        defined.assign(lds_bytes + 16, lds_given ? 0xff : 0);
    }

    void make_bytes() {
        bytes_ready = true;
        bytes.make(dwords.write.size() * 4, group.waves.size());
        if (atomics_ready) bytes.make_atomics(group.waves.size());
    }

    void make_atomics() {
        atomics_ready = true;
        dwords.make_atomics(group.waves.size());
        if (bytes_ready) bytes.make_atomics(group.waves.size());
    }

    uint32_t new_lds_op(const Wave& wave, State& st, const Inst& inst, bool atomic) {
        if (!st.lds_op) st.lds_op = new_op(lds_ops, wave, inst, atomic);
        return st.lds_op;
    }

    static uint32_t new_op(std::vector<Operation>& ops, const Wave& wave, const Inst& inst,
                           bool atomic) {
        if (ops.size() > kMostOperations)
            throw std::length_error(
                "more than 2^25 LDS operations of a workgroup without a "
                "barrier that orders them");
        ops.push_back({wave.id, atomic, &inst});
        return static_cast<uint32_t>(ops.size() - 1);
    }

    // When everything so far is ordered before everything to come, its history may go: a long
    // kernel's would fill the numbers, and 24 bytes each of memory.
    void forget(bool lds, bool dma) {
        auto clear_all = [](std::vector<uint32_t>& plane) {
            std::fill(plane.begin(), plane.end(), 0);
        };
        for (Planes* planes : {&dwords, &bytes}) {
            if (dma)
                for (uint32_t& code : planes->dma) code = 0;
            if (!lds) continue;
            for (uint32_t& code : planes->write) code = code == kSplit ? kSplit : 0;
            clear_all(planes->read);
            clear_all(planes->atomic);
            for (auto& plane : planes->reads) clear_all(plane);
            for (auto& plane : planes->atomics) clear_all(plane);
        }
        if (lds) lds_ops.resize(1);
        if (dma) dma_ops.resize(1);
        for (auto& st : states) {
            if (!st || st->ended) continue;
            if (lds) st->retired_lds = st->arrived_lds = st->passed_lds = 0;
            if (dma) st->retired_dma = st->arrived_dma = st->passed_dma = 0;
        }
    }

    struct Conflict {
        uint32_t op = 0;
        bool dma = false;
        const char* did = "";
        bool own = false, stored = false;  // by this wave; by a plain store
    };

    // The earlier operation that an access of wave `me` to one unit is not ordered after.
    Conflict unordered(const Planes& p, size_t unit, Use use, const State& mine,
                       uint16_t me) const {
        auto late = [&](uint32_t code, size_t wave) {
            if (code < safe_lds || code == kSplit) return false;
            if (wave == me) return use == Use::dma && code >> 5 > mine.retired_lds;
            return code >> 5 > states[wave]->passed_lds;
        };
        const uint32_t write = p.write[unit];
        if (late(write, write & kWaveMask))
            return {write >> 5, false, "written", (write & kWaveMask) == me, true};
        const uint32_t dma = p.dma[unit], number = dma >> 5;
        if (dma >= safe_dma) {
            const uint32_t wave = dma & kWaveMask;
            if (wave != me && number > states[wave]->passed_dma)
                return {number, true, "written", false};
            if (wave == me && use != Use::dma && number > mine.retired_dma)
                return {number, true, "written", true};
        }
        if (atomics_ready && use != Use::atomic && p.atomic[unit] >= safe_lds)
            for (size_t w = 0; w < p.atomics.size(); ++w)
                if (late(p.atomics[w][unit], w))
                    return {p.atomics[w][unit] >> 5, false, "changed", w == me};
        if (use != Use::read && p.read[unit] >= safe_lds)
            for (size_t w = 0; w < p.reads.size(); ++w)
                if (late(p.reads[w][unit], w))
                    return {p.reads[w][unit] >> 5, false, "read", w == me};
        return {};
    }

    // `code` over what the unit's table says so far.
    uint32_t joined(uint32_t before, uint32_t code) const {
        const bool shared = before >= safe_lds && ((before ^ code) & kWaveMask) != 0;
        return shared ? code | kShared : code;
    }

    void record(Planes& p, size_t unit, Use use, uint32_t code, uint16_t me) {
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

    void race(Wave& wave, const Inst& inst, int lane, uint32_t address, Use use,
              const Conflict& found) {
        const Operation& op = (found.dma ? dma_ops : lds_ops)[found.op];
        if (raced) return;  // one occurrence per access, however many lanes
        raced = true;
        const bool before_barrier = found.op < (found.dma ? released_dma : released_lds);
        const char* verb = use == Use::read ? "reads" : use == Use::atomic ? "changes" : "writes";
        report(wave, inst, "LDS race", [&] {
            std::string text = "wave " + std::to_string(wave.id) + " lane " + std::to_string(lane) +
                               " " + verb + " LDS byte " + hex(address) + " (" + to_string(inst) +
                               "), which ";
            text += found.own ? "it has" : "wave " + std::to_string(op.wave) + " has";
            text += std::string(" ") + found.did + " by " + to_string(*op.inst) + " at +" +
                    hex(op.inst->offset) + " ";
            if (found.own)
                text +=
                    std::string("and not waited for (") + (found.dma ? "vmcnt" : "lgkmcnt") + ")";
            else if (before_barrier)
                text += std::string("without waiting for it (") +
                        (found.dma ? "vmcnt" : "lgkmcnt") + ") before the barrier that both passed";
            else
                text += "since; no barrier lies between";
            return text;
        });
    }

    void split(size_t dword) {
        if (!bytes_ready) make_bytes();
        for (size_t b = dword * 4; b < dword * 4 + 4; ++b) {
            bytes.write[b] = dwords.write[dword];
            bytes.dma[b] = dwords.dma[dword];
            bytes.read[b] = dwords.read[dword];
            for (size_t w = 0; w < dwords.reads.size(); ++w)
                bytes.reads[w][b] = dwords.reads[w][dword];
            if (!atomics_ready) continue;
            bytes.atomic[b] = dwords.atomic[dword];
            for (size_t w = 0; w < dwords.atomics.size(); ++w)
                bytes.atomics[w][b] = dwords.atomics[w][dword];
        }
        dwords.write[dword] = kSplit;
    }

    // True when a lane of a store writes what LDS holds already: `count` bytes at `from`, the
    // lane's bytes begin at `address` with data register `dword`.
    bool same_bytes(const Wave& wave, const Inst& inst, int lane, uint32_t address, uint32_t dword,
                    uint32_t from, uint32_t count) const {
        const Operand& data = dword < inst.src[1].dwords ? inst.src[1] : inst.src[2];
        const uint32_t row = data.index + dword - (&data == &inst.src[2] ? inst.src[1].dwords : 0u);
        const uint32_t skip = std::strstr(inst.name, "_d16_hi") ? 2 : 0;
        for (uint32_t b = from; b < from + count; ++b) {
            const uint32_t at = b - address + skip;
            const uint8_t byte = static_cast<uint8_t>(wave.v[row + at / 4][lane] >> at % 4 * 8);
            if (group.lds[b] != byte) return false;
        }
        return true;
    }

    // One lane's access, exact.
    void access_slow(Wave& wave, State& st, const Inst& inst, int lane, uint32_t address,
                     uint32_t size, Use use, uint32_t code, uint32_t data) {
        const uint32_t end = address + size;
        auto harmless = [&](const Conflict& found, uint32_t from, uint32_t count) {
            return use == Use::write && found.stored &&
                   same_bytes(wave, inst, lane, address, data, from, count);
        };
        for (uint32_t dword = address / 4; dword * 4 < end; ++dword) {
            const uint32_t from = std::max(address, dword * 4), to = std::min(end, dword * 4 + 4);
            const bool whole = to - from == 4;
            if (!whole && dwords.write[dword] != kSplit) split(dword);
            if (dwords.write[dword] != kSplit) {
                const Conflict found = unordered(dwords, dword, use, st, wave.id);
                if (found.op && !harmless(found, from, to - from))
                    race(wave, inst, lane, from, use, found);
                record(dwords, dword, use, code, wave.id);
                continue;
            }
            for (uint32_t b = from; b < to; ++b) {
                const Conflict found = unordered(bytes, b, use, st, wave.id);
                if (found.op && !harmless(found, b, 1)) race(wave, inst, lane, b, use, found);
                record(bytes, b, use, code, wave.id);
            }
            if (whole && use == Use::write) dwords.write[dword] = code;  // one owner again
        }
    }

    // The dwords that an instruction's active lanes access: `count` groups of Each neighbours. The
    // passes below take four dwords at a time; a ds_read_b128 of a wave is 64 steps of each.
    struct Groups {
        uint32_t first[kLanes];
        int count = 0;
    };

    template <int Each>
    static Quad take(const std::vector<uint32_t>& plane, const uint32_t* first) {
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
    static void give(std::vector<uint32_t>& plane, const uint32_t* first, Quad value) {
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

    static Quad splat(uint32_t value) {
        const int32_t v = static_cast<int32_t>(value);
        return Quad{v, v, v, v};
    }

    // Entries that are neither ordered (below `safe`) nor of wave `me`.
    static Quad foreign(Quad value, Quad limit, Quad me) {
        return (value > limit) & ((value & splat(kWaveMask)) != me);
    }

    static bool any(Quad value) { return (value[0] | value[1] | value[2] | value[3]) != 0; }

    // True when no dword's entry is foreign; kNobody as `me` excepts no wave.
    template <int Each>
    static bool clear(const std::vector<uint32_t>& plane, const Groups& groups, uint32_t safe,
                      uint32_t me) {
        Quad bad = {};
        const Quad limit = splat(safe - 1), who = splat(me);
        for (int g = 0; g < groups.count; g += 4 / Each)
            bad |= foreign(take<Each>(plane, groups.first + g), limit, who);
        return !any(bad);
    }

    // False when the access needs the exact check.
    template <int Each>
    bool access_quick(const Groups& groups, Use use, uint32_t code, uint16_t me) {
        if (atomics_ready && use != Use::atomic &&
            !clear<Each>(dwords.atomic, groups, safe_lds, kNobody))
            return false;
        constexpr int step = 4 / Each;
        const Quad value = splat(code), who = splat(me), limit = splat(safe_lds - 1);
        if (use == Use::read) {
            Quad bad = {};
            const Quad dma_limit = splat(safe_dma - 1), nobody = splat(kNobody);
            for (int g = 0; g < groups.count; g += step) {
                const uint32_t* first = groups.first + g;
                bad |= foreign(take<Each>(dwords.write, first), limit, who);
                bad |= foreign(take<Each>(dwords.dma, first), dma_limit, nobody);
                const Quad shared = foreign(take<Each>(dwords.read, first), limit, who);
                give<Each>(dwords.read, first, value | (shared & splat(kShared)));
                give<Each>(dwords.reads[me], first, value);
            }
            return !any(bad);  // the exact check records the same once more
        }
        const uint32_t own = use == Use::dma ? kNobody : me;
        if (!clear<Each>(dwords.write, groups, safe_lds, own) ||
            !clear<Each>(dwords.read, groups, safe_lds, own) ||
            !clear<Each>(dwords.dma, groups, safe_dma, use == Use::dma ? me : kNobody))
            return false;
        for (int g = 0; g < groups.count; g += step) {
            const uint32_t* first = groups.first + g;
            if (use == Use::write) give<Each>(dwords.write, first, value);
            if (use == Use::dma) give<Each>(dwords.dma, first, value);
            if (use != Use::atomic) continue;
            give<Each>(dwords.atomic, first, value);
            give<Each>(dwords.atomics[me], first, value);
        }
        return true;
    }

    void access(Wave& wave, State& st, const Inst& inst, const uint32_t* address, uint64_t lanes,
                uint32_t size, Use use, uint32_t number, uint32_t data = 0) {
        const uint32_t code = number << 5 | wave.id;
        if (use == Use::atomic && !atomics_ready) make_atomics();
        uint32_t merged = size;
        Groups groups;
        if (lanes == kAll) {
            for (int lane = 0; lane < kLanes; ++lane) {
                merged |= address[lane];
                groups.first[lane] = address[lane] / 4;
            }
            groups.count = kLanes;
        } else {
            for (uint64_t left = lanes; left; left &= left - 1) {
                const uint32_t at = address[std::countr_zero(left)];
                merged |= at;
                groups.first[groups.count++] = at / 4;
            }
        }
        bool done = false;
        raced = false;
        if (merged % 4 == 0) {
            while (groups.count % 4) {  // fill up with the first: once more changes nothing
                groups.first[groups.count] = groups.first[0];
                ++groups.count;
            }
            if (size == 4) done = access_quick<1>(groups, use, code, wave.id);
            if (size == 8) done = access_quick<2>(groups, use, code, wave.id);
            if (size == 16) done = access_quick<4>(groups, use, code, wave.id);
        }
        if (done) return;
        for (uint64_t left = lanes; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            access_slow(wave, st, inst, lane, address[lane], size, use, code, data);
        }
    }

    // ---- 4. undefined values
    // ---------------------------------------------------------------------------

    void undefined(Wave& wave, const Inst& inst, const std::string& what) {
        report(wave, inst, "undefined value", [&] { return what + " (" + to_string(inst) + ")"; });
    }

    void need_scalar(Wave& wave, State& st, const Inst& inst, int index, const char* role) {
        if (st.s[index] == ~0u) return;
        undefined(wave, inst, register_name(false, index) + " is undefined and used as " + role);
        st.s[index] = ~0u;  // reported once; do not follow it further
    }

    void need_vector(Wave& wave, State& st, const Inst& inst, int index, uint64_t lanes,
                     const char* role) {
        const uint64_t bad = lanes & ~st.v[index];
        if (!bad) return;
        undefined(wave, inst,
                  register_name(true, index) + " is undefined in " + lanes_text(bad) +
                      " and used as " + role);
        st.v[index] |= bad;
    }

    static uint32_t value32(const Wave& wave, const Operand& operand) {
        if (operand.kind == Kind::scalar) return wave.s[operand.index];
        if (operand.kind == Kind::constant) return static_cast<uint32_t>(operand.value);
        return 0;
    }

    struct Bits {
        uint64_t value, defined;
    };

    static Bits bits_of(const Wave& wave, const State& st, const Operand& operand) {
        if (operand.kind == Kind::scalar) {
            if (operand.dwords == 2)
                return {wave.pair(operand.index),
                        static_cast<uint64_t>(st.s[operand.index + 1]) << 32 | st.s[operand.index]};
            return {wave.s[operand.index], st.s[operand.index] | ~0ull << 32};
        }
        if (operand.kind == Kind::constant) return {operand.value, kAll};
        if (operand.index == 253) return {wave.scc, st.s[kScc] ? kAll : 0};
        return {0, kAll};
    }

    void set_bits(Wave& wave, State& st, const Inst& inst, const Operand& dst,
                  uint64_t defined_bits) {
        for (int k = 0; k < dst.dwords; ++k)
            st.s[dst.index + k] = static_cast<uint32_t>(defined_bits >> 32 * k);
        if (dst.dwords && dst.index + dst.dwords > kExec) steer(wave, st, inst);
    }

    // EXEC decides what runs: it must be defined.
    void steer(Wave& wave, State& st, const Inst& inst) {
        need_scalar(wave, st, inst, kExec, "the lanes to execute");
        need_scalar(wave, st, inst, kExec + 1, "the lanes to execute");
    }

    void scalar_flow(Wave& wave, State& st, const Inst& inst, const Info& in) {
        Bits a = bits_of(wave, st, inst.src[0]);
        Bits b = bits_of(wave, st, inst.src[1]);
        const Operand& dst = inst.dst[0];
        const uint64_t width = dst.dwords == 2 ? kAll : 0xffffffffull;
        uint64_t result = 0, value = 0;  // defined bits; value where they are
        if (inst.writes_exec) {
            // exec = op(src, exec), the order of operands as s_andn2 has it; dst = the old exec, or
            // the new one of s_*_wrexec
            const Bits exec = {wave.exec(), kAll};
            if (starts(inst.name, "s_andn1") || starts(inst.name, "s_orn1"))
                b = a, a = exec;
            else
                b = exec;
        }
        switch (in.rule) {
            case Rule::copy:
                result = a.defined;
                value = a.value;
                break;
            case Rule::negate:
                result = a.defined;
                value = ~a.value;
                break;
            case Rule::bit_and:
                result = (a.defined & b.defined) | (a.defined & ~a.value) | (b.defined & ~b.value);
                value = a.value & b.value;
                break;
            case Rule::bit_andn2:
                result = (a.defined & b.defined) | (a.defined & ~a.value) | (b.defined & b.value);
                value = a.value & ~b.value;
                break;
            case Rule::bit_or:
                result = (a.defined & b.defined) | (a.defined & a.value) | (b.defined & b.value);
                value = a.value | b.value;
                break;
            case Rule::bit_orn2:
                result = (a.defined & b.defined) | (a.defined & a.value) | (b.defined & ~b.value);
                value = a.value | ~b.value;
                break;
            case Rule::bit_xor:
                result = a.defined & b.defined;
                value = a.value ^ b.value;
                break;
            case Rule::shift_left:
            case Rule::shift_right: {
                const uint64_t shift = b.value & (dst.dwords == 2 ? 63 : 31);
                if (b.defined != kAll) break;
                const uint64_t undef = ~a.defined & width;
                result = ~(in.rule == Rule::shift_left ? undef << shift : undef >> shift);
                value = in.rule == Rule::shift_left ? a.value << shift : (a.value & width) >> shift;
                break;
            }
            case Rule::choose:
                if (st.s[kScc]) result = wave.scc ? a.defined : b.defined;
                break;
            case Rule::test_bit: {
                const int bit = static_cast<int>(b.value & (inst.src[0].dwords == 2 ? 63 : 31));
                st.s[kScc] = b.defined == kAll && (a.defined >> bit & 1) ? ~0u : 0u;
                return;
            }
            default: {
                bool all = true;
                for (uint16_t r : in.scalar_src) all &= st.s[r] == ~0u;
                for (uint16_t r : in.scalar_dst) st.s[r] = all ? ~0u : 0u;
                for (uint16_t r : in.scalar_dst)
                    if (r == kExec || r == kExec + 1) steer(wave, st, inst);
                return;
            }
        }
        if (starts(inst.name, "s_nand") || starts(inst.name, "s_nor") ||
            starts(inst.name, "s_xnor"))
            value = ~value;
        // SCC says whether the result is nonzero: known as soon as one defined bit is set.
        if (inst.writes_scc)
            st.s[kScc] = (~result & width) == 0 || (result & value & width) ? ~0u : 0u;
        if (in.saves_exec) {
            set_bits(wave, st, inst, dst, kAll);
            st.s[kExec] = static_cast<uint32_t>(result);
            st.s[kExec + 1] = static_cast<uint32_t>(result >> 32);
            steer(wave, st, inst);
        } else {
            set_bits(wave, st, inst, dst, result);
            if (!inst.writes_exec) return;
            st.s[kExec] = static_cast<uint32_t>(result);
            st.s[kExec + 1] = static_cast<uint32_t>(result >> 32);
            steer(wave, st, inst);
        }
    }

    static int dpp_source(int control, int lane) {
        const int row = lane & ~15, in_row = lane & 15, n = control & 15;
        if (control <= 0xff) return (lane & ~3) | (control >> 2 * (lane & 3) & 3);
        switch (control >> 4) {
            case 0x10:
                return in_row + n < 16 ? lane + n : -1;
            case 0x11:
                return in_row >= n ? lane - n : -1;
            case 0x12:
                return row | ((in_row - n) & 15);
            case 0x15:
                return row | n;
            default:
                break;
        }
        switch (control) {
            case 0x130:
                return lane < 63 ? lane + 1 : -1;
            case 0x134:
                return (lane + 1) & 63;
            case 0x138:
                return lane - 1;
            case 0x13c:
                return (lane - 1) & 63;
            case 0x140:
                return row | (15 - in_row);
            case 0x141:
                return (lane & ~7) | (7 - (lane & 7));
            case 0x142:
                return row ? row - 1 : -1;
            case 0x143:
                return lane >= 32 ? 31 : -1;
            default:
                return -1;
        }
    }

    // Lanes in which all sources of a vector instruction are defined; `write` loses the lanes that
    // a DPP instruction leaves alone.
    uint64_t sources(Wave& wave, State& st, const Inst& inst, const Info& in, uint64_t& write) {
        uint64_t good = kAll;
        for (uint16_t r : in.scalar_src)
            if (st.s[r] != ~0u) good = 0;
        for (uint16_t r : in.mask_src) good &= static_cast<uint64_t>(st.s[r + 1]) << 32 | st.s[r];
        if (!inst.dpp) {
            for (uint16_t r : in.vector_src) good &= st.v[r];
            return good;
        }
        const uint64_t exec = wave.exec();
        uint64_t first = kAll, valid = 0, moved = 0;
        for (int r = inst.src[0].index; r < inst.src[0].index + inst.src[0].dwords; ++r)
            first &= st.v[r];
        for (int lane = 0; lane < kLanes; ++lane) {
            const int from = dpp_source(inst.dpp_ctrl, lane);
            if (from < 0 || !(exec >> from & 1)) continue;
            valid |= 1ull << lane;
            moved |= (first >> from & 1) << lane;
        }
        for (size_t n = 1; n < 3; ++n)
            if (inst.src[n].kind == Kind::vector)
                for (int r = inst.src[n].index; r < inst.src[n].index + inst.src[n].dwords; ++r)
                    good &= st.v[r];
        for (int lane = 0; lane < kLanes; ++lane)
            if (!(inst.row_mask >> lane / 16 & 1) || !(inst.bank_mask >> (lane / 4 & 3) & 1))
                write &= ~(1ull << lane);
        if (!inst.bound_ctrl) write &= valid;
        return good & (moved | ~valid);
    }

    // Lanes in which what one half of the result takes from a source is defined.
    static uint64_t half_source(const State& st, const Operand& src, Halves halves, int half) {
        if (src.kind != Kind::vector && src.kind != Kind::scalar) return kAll;
        int first = 0, last = src.dwords - 1;
        if (src.dwords == 2) {
            const bool high =
                halves == Halves::packed ? (half ? src.op_sel_hi : src.op_sel) : half != 0;
            const bool one = halves == Halves::apart || halves == Halves::packed ||
                             (halves == Halves::upwards && half == 0) ||
                             (halves == Halves::downwards && half == 1);
            if (one) first = last = high;
        }
        uint64_t good = kAll;
        for (int k = first; k <= last; ++k) {
            if (src.kind == Kind::vector)
                good &= st.v[src.index + k];
            else if (st.s[src.index + k] != ~0u)
                good = 0;
        }
        return good;
    }

    void half_flow(Wave& wave, State& st, const Inst& inst, const Info& in) {
        const uint64_t exec = wave.exec();
        uint64_t good[2] = {kAll, kAll};
        for (int half = 0; half < 2; ++half)
            for (const Operand& src : inst.src) good[half] &= half_source(st, src, in.halves, half);
        if (inst.reads_dst)
            for (int half = 0; half < 2; ++half) good[half] &= st.v[in.vector_dst[half]];
        for (int half = 0; half < 2; ++half) {
            uint64_t& lanes = st.v[in.vector_dst[half]];
            lanes = (lanes & ~exec) | (good[half] & exec);
        }
        if (in.mask_dst < 0) return;
        const uint64_t bits = good[1] | ~exec;
        st.s[in.mask_dst] = static_cast<uint32_t>(bits);
        st.s[in.mask_dst + 1] = static_cast<uint32_t>(bits >> 32);
    }

    void vector_flow(Wave& wave, State& st, const Inst& inst, const Info& in) {
        uint64_t write = wave.exec();
        switch (in.rule) {
            case Rule::vector:
            case Rule::compare: {
                if (in.halves != Halves::both) return half_flow(wave, st, inst, in);
                const uint64_t good = sources(wave, st, inst, in, write);
                for (uint16_t r : in.vector_dst) st.v[r] = (st.v[r] & ~write) | (good & write);
                for (uint16_t r : in.scalar_dst) st.s[r] = good ? ~0u : 0u;
                if (in.mask_dst >= 0) {  // inactive lanes become zero
                    const uint64_t bits = good | ~wave.exec();
                    st.s[in.mask_dst] = static_cast<uint32_t>(bits);
                    st.s[in.mask_dst + 1] = static_cast<uint32_t>(bits >> 32);
                    if (inst.writes_exec || in.mask_dst == kExec) {
                        st.s[kExec] = static_cast<uint32_t>(bits);
                        st.s[kExec + 1] = static_cast<uint32_t>(bits >> 32);
                        steer(wave, st, inst);
                    }
                }
                return;
            }
            case Rule::select: {
                const Operand& mask = inst.src[2];
                const Bits chosen = bits_of(wave, st, mask);
                auto lanes_of = [&](const Operand& operand) {
                    if (operand.kind == Kind::vector) return st.v[operand.index];
                    if (operand.kind == Kind::scalar) return st.s[operand.index] == ~0u ? kAll : 0;
                    return kAll;
                };
                const uint64_t good = chosen.defined & ((chosen.value & lanes_of(inst.src[1])) |
                                                        (~chosen.value & lanes_of(inst.src[0])));
                for (uint16_t r : in.vector_dst) st.v[r] = (st.v[r] & ~write) | (good & write);
                return;
            }
            case Rule::first_lane: {
                const int lane = write ? std::countr_zero(write) : 0;
                bool good = true;
                for (uint16_t r : in.vector_src) good &= st.v[r] >> lane & 1;
                for (uint16_t r : in.scalar_dst) st.s[r] = good ? ~0u : 0u;
                return;
            }
            case Rule::read_lane: {
                const int lane = static_cast<int>(value32(wave, inst.src[1]) & 63);
                bool good = true;
                for (uint16_t r : in.vector_src) good &= st.v[r] >> lane & 1;
                for (uint16_t r : in.scalar_src) good &= st.s[r] == ~0u;
                for (uint16_t r : in.scalar_dst) st.s[r] = good ? ~0u : 0u;
                return;
            }
            case Rule::write_lane: {
                const int lane = static_cast<int>(value32(wave, inst.src[1]) & 63);
                bool good = true;
                for (uint16_t r : in.scalar_src) good &= st.s[r] == ~0u;
                for (uint16_t r : in.vector_dst)
                    st.v[r] = (st.v[r] & ~(1ull << lane)) | static_cast<uint64_t>(good) << lane;
                return;
            }
            case Rule::matrix: {
                uint64_t good = kAll;
                for (uint16_t r : in.vector_src) good &= st.v[r];
                if (inst.reads_dst)
                    for (uint16_t r : in.vector_dst) good &= st.v[r];
                for (uint16_t r : in.vector_dst) st.v[r] = good == kAll ? kAll : 0;
                return;
            }
            default:
                return;
        }
    }

    void lane_flow(Wave& wave, State& st, const Inst& inst, const Info& in) {
        const uint64_t exec = wave.exec();
        uint64_t good = 0;
        if (in.rule == Rule::swizzle) {
            const uint64_t from = st.v[inst.src[0].index] | ~exec;  // inactive lanes give zero
            for (int lane = 0; lane < kLanes; ++lane)
                good |= (from >> swizzle_source(inst.imm, lane) & 1) << lane;
        } else {
            const uint64_t data = st.v[inst.src[1].index], address = st.v[inst.src[0].index];
            const uint32_t* to = wave.v[inst.src[0].index];
            if (in.rule == Rule::bpermute) {
                for (int lane = 0; lane < kLanes; ++lane)
                    good |= ((data | ~exec) >>
                                 ((to[lane] + static_cast<uint32_t>(inst.imm)) >> 2 & 63) &
                             1)
                            << lane;
                good &= address;
            } else if ((exec & ~address) == 0) {
                good = kAll;  // lanes that nobody pushes to get zero
                for (uint64_t left = exec; left; left &= left - 1) {
                    const int lane = std::countr_zero(left);
                    const int target =
                        static_cast<int>((to[lane] + static_cast<uint32_t>(inst.imm)) >> 2 & 63);
                    good = (good & ~(1ull << target)) | (data >> lane & 1) << target;
                }
            }
        }
        st.loaded[0] = good;
    }

    void memory_sources(Wave& wave, State& st, const Inst& inst, const Info& in) {
        const uint64_t exec = wave.exec();
        if (!exec) return;
        for (uint16_t r : in.scalar_src)
            need_scalar(wave, st, inst, r, r == kM0 ? "the LDS address" : "part of the address");
        const Operand& address = inst.src[0];
        for (int k = 0; k < address.dwords; ++k)
            need_vector(wave, st, inst, address.index + k, exec, "the address");
    }

    // Lanes whose data registers for the dwords [dword, dword + count) are defined.
    static uint64_t data_defined(const State& st, const Inst& inst, uint32_t dword, uint32_t count,
                                 bool atomic) {
        uint64_t good = kAll;
        auto take = [&](const Operand& data, uint32_t from, uint32_t to) {
            for (uint32_t k = from; k < to && k < data.dwords; ++k) good &= st.v[data.index + k];
        };
        if (atomic) {
            take(inst.src[1], 0, 64);
            take(inst.src[2], 0, 64);
            return good;
        }
        const uint32_t first = inst.src[1].dwords;
        if (dword < first)
            take(inst.src[1], dword, dword + count);
        else
            take(inst.src[2], dword - first, dword - first + count);
        return good;
    }

    // `inst` with the registers that M0 makes of its operands'.
    void move_operands(Wave& wave, State& st, const Inst& inst, const Info& in) {
        const uint32_t m0 = wave.s[kM0];
        moved = inst;
        need_scalar(wave, st, inst, kM0, "a register's number");
        if (in.relative) {
            Operand& o = starts(inst.name, "s_movrels") ? moved.src[0] : moved.dst[0];
            o.index = static_cast<uint16_t>((o.index + m0) & (o.dwords == 2 ? 126 : 127));
        } else {
            const auto move = [&](Operand& o, int bit) {
                if (o.kind == Kind::vector && (m0 >> bit & 1))
                    o.index = static_cast<uint16_t>((o.index + (m0 & 255)) & 511);
            };
            for (int n = 0; n < 3; ++n) move(moved.src[n], 12 + n);
            move(moved.dst[0], 15);
        }
        moved_info = describe(moved);
    }

    void before(Wave& wave, const Inst& inst) {
        State& st = state(wave);
        const Info& in = info_of(wave, inst);
        if (in.relative || (in.indexed && (wave.mode & kGprIndexing))) [[unlikely]] {
            move_operands(wave, st, inst, in);
            return before(wave, st, moved, moved_info);
        }
        before(wave, st, inst, in);
    }

    void before(Wave& wave, State& st, const Inst& inst, const Info& in) {
        info = &in;
        if (st.any_flight && !in.touches.empty()) check_flight(wave, st, inst, in);
        if (in.simple) {
            uint64_t good = kAll;
            const uint64_t exec = wave.exec();
            for (uint16_t r : in.vector_src) good &= st.v[r];
            for (uint16_t r : in.scalar_src)
                if (st.s[r] != ~0u) good = 0;
            for (uint16_t r : in.vector_dst) st.v[r] = (st.v[r] & ~exec) | (good & exec);
            return;
        }
        switch (in.rule) {
            case Rule::none:
                return;
            case Rule::memory:
                memory_sources(wave, st, inst, in);
                std::fill(st.loaded, st.loaded + 16, kAll);
                st.lds_op = st.dma_op = 0;
                return;
            case Rule::permute:
            case Rule::bpermute:
            case Rule::swizzle:
                lane_flow(wave, st, inst, in);
                st.lds_op = 0;
                return;
            case Rule::scalar_memory:
                for (uint16_t r : in.scalar_src)
                    need_scalar(wave, st, inst, r, "part of the address");
                std::fill(st.loaded, st.loaded + 16, kAll);
                return;
            case Rule::branch_scc:
                need_scalar(wave, st, inst, kScc, "the branch condition");
                return;
            case Rule::branch_vcc: {
                const uint64_t known = static_cast<uint64_t>(st.s[kVcc + 1]) << 32 | st.s[kVcc];
                if (known == kAll || (known & wave.vcc())) return;  // one set bit decides
                need_scalar(wave, st, inst, kVcc, "the branch condition");
                need_scalar(wave, st, inst, kVcc + 1, "the branch condition");
                return;
            }
            case Rule::branch_exec:
                return;  // reported where EXEC was written
            case Rule::jump:
                for (uint16_t r : in.scalar_src)
                    need_scalar(wave, st, inst, r, "the branch target");
                for (uint16_t r : in.scalar_dst) st.s[r] = ~0u;
                return;
            case Rule::vector:
            case Rule::compare:
            case Rule::select:
            case Rule::first_lane:
            case Rule::read_lane:
            case Rule::write_lane:
            case Rule::matrix:
                vector_flow(wave, st, inst, in);
                return;
            default:
                scalar_flow(wave, st, inst, in);
                return;
        }
    }

    void after(Wave& wave, const Inst& inst) {
        const Info& in = *info;
        if (in.rule < Rule::permute) return;
        if (!(in.counts_vm | in.counts_ds | in.counts_smem)) return;
        State& st = *states[wave.id];
        if (in.counts_smem) {
            for (size_t k = 0; k < in.scalar_dst.size(); ++k)
                st.s[in.scalar_dst[k]] = st.loaded[std::min<size_t>(k, 15)] ? ~0u : 0u;
            mark(st, inst, true);
            st.smem.push_back(&inst);
            return;
        }
        const uint64_t exec = wave.exec();
        for (size_t k = 0; k < in.vector_dst.size(); ++k) {
            uint64_t& lanes = st.v[in.vector_dst[k]];
            lanes = (lanes & ~exec) | (st.loaded[std::min<size_t>(k, 15)] & exec);
        }
        if (in.flat) {
            st.flats.push_back({&inst, st.lds_op, false, false});
            // Stores that no counter can tell from later ones are forgotten, as below.
            if (st.flats.size() > 64 && !st.flats[0].lds_op && !st.flats[0].inst->dst[0].dwords)
                st.flats.erase(st.flats.begin());
        } else if (in.counts_vm) {
            st.vm.push({&inst, st.dma_op});
            // The counter ends at 63: older stores have left it, and no wait speaks of them.
            while (st.vm.size() > 64 && !st.vm.begin()->lds_op &&
                   !st.vm.begin()->inst->dst[0].dwords)
                st.vm.pop();
        }
        if (in.counts_ds && !in.flat) st.ds.push({&inst, st.lds_op});
        if (in.load) mark(st, inst, true);
    }
};

Checker::Checker(Workgroup& group, Memory& memory, Findings& findings, GlobalAccesses* accesses)
    : impl_(std::make_unique<Impl>(group, memory, findings, accesses)) {}
Checker::~Checker() = default;

void Checker::define_scalar(Wave& wave, int first, int count) {
    State& st = impl_->state(wave);
    for (int r = first; r < first + count && r <= kScalarRegisters; ++r) st.s[r] = ~0u;
    if (first + count >= kScalarRegisters) st.s[kScc] = ~0u;
}

void Checker::define_vector(Wave& wave, int first, int count) {
    State& st = impl_->state(wave);
    for (int r = first; r < first + count && r < kVectorRegisters; ++r) st.v[r] = kAll;
}

void Checker::define_lds() {
    impl_->lds_given = true;
    std::fill(impl_->defined.begin(), impl_->defined.end(), 0xff);
}

void Checker::before(Wave& wave, const Inst& inst) { impl_->before(wave, inst); }
void Checker::after(Wave& wave, const Inst& inst) { impl_->after(wave, inst); }

void Checker::wait(Wave& wave, int vmcnt, int lgkmcnt, int) {
    State& st = impl_->state(wave);
    // The largest count of either field means no wait.
    if (vmcnt < 63) impl_->retire_vm(st, static_cast<size_t>(vmcnt));
    if (lgkmcnt < 15) impl_->retire_lgkm(st, static_cast<size_t>(lgkmcnt));
}

void Checker::arrive(Wave& wave) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    ++st.barriers;
    st.arrived_lds = st.retired_lds;
    st.arrived_dma = st.retired_dma;
    st.front_lds = st.front_dma = 0;
    for (const Flight& flight : st.ds)
        if (flight.lds_op && !st.front_lds) st.front_lds = flight.lds_op;
    for (const Flight& flight : st.vm)
        if (flight.lds_op && !st.front_dma) st.front_dma = flight.lds_op;
    for (const Flat& flat : st.flats)
        if (flat.lds_op && !flat.lgkm_done && (!st.front_lds || flat.lds_op < st.front_lds))
            st.front_lds = flat.lds_op;
    for (const Wave* other : c.group.waves) {
        const State& o = c.state(*other);
        if (!o.ended || o.barriers >= st.barriers || !wave.code) continue;
        c.report(wave, wave.code->insts[wave.pc - 1], "barrier divergence", [&] {
            return "wave " + std::to_string(wave.id) + " is at its barrier number " +
                   std::to_string(st.barriers) + ", wave " + std::to_string(other->id) +
                   " ended after " + std::to_string(o.barriers);
        });
        break;
    }
}

void Checker::release() {
    Impl& c = *impl_;
    const auto all_lds = static_cast<uint32_t>(c.lds_ops.size());
    const auto all_dma = static_cast<uint32_t>(c.dma_ops.size());
    uint32_t safe_lds = all_lds, safe_dma = all_dma;
    for (const Wave* wave : c.group.waves) {
        State& st = c.state(*wave);
        st.passed_lds = st.arrived_lds;
        st.passed_dma = st.arrived_dma;
        if (st.front_lds) safe_lds = std::min(safe_lds, st.front_lds);
        if (st.front_dma) safe_dma = std::min(safe_dma, st.front_dma);
    }
    const bool forget_lds = all_lds > kHistory && safe_lds == all_lds;
    const bool forget_dma = all_dma > kHistory && safe_dma == all_dma;
    if (forget_lds || forget_dma) c.forget(forget_lds, forget_dma);
    c.released_lds = forget_lds ? 1 : all_lds;
    c.released_dma = forget_dma ? 1 : all_dma;
    c.safe_lds = (forget_lds ? 1 : safe_lds) << 5;
    c.safe_dma = (forget_dma ? 1 : safe_dma) << 5;
}

void Checker::end(Wave& wave) {
    Impl& c = *impl_;
    State& st = c.state(wave);
    st.ended = true;
    // s_endpgm waits for everything, and the barriers of the others no longer wait for this wave.
    st.retired_lds = st.retired_dma = st.arrived_lds = st.arrived_dma = kEver;
    st.front_lds = st.front_dma = 0;
    for (const Wave* other : c.group.waves) {
        const State& o = c.state(*other);
        if (o.barriers <= st.barriers || !wave.code) continue;
        c.report(wave, wave.code->insts[wave.pc - 1], "barrier divergence", [&] {
            return "wave " + std::to_string(wave.id) + " ends after " +
                   std::to_string(st.barriers) + " barriers, wave " + std::to_string(other->id) +
                   " is at barrier number " + std::to_string(o.barriers);
        });
        break;
    }
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
        const int lane = std::countr_zero(outside);
        c.report(wave, inst, "LDS out of bounds", [&] {
            return to_string(inst) + " accesses LDS byte " + hex(address[lane]) + " in " +
                   lanes_text(outside) + "; the workgroup has " + std::to_string(c.lds_bytes) +
                   " bytes";
        });
        lanes &= ~outside;
    }
    if (access == Access::atomic && merged % bytes != 0) {
        uint64_t bad = 0;
        for (uint64_t left = lanes; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            if (address[lane] % bytes) bad |= 1ull << lane;
        }
        if (bad)
            c.report(wave, inst, "misaligned", [&] {
                return to_string(inst) + " at LDS byte " + hex(address[std::countr_zero(bad)]) +
                       " in " + lanes_text(bad);
            });
        lanes &= ~bad;
    }
    if (!lanes) return;
    const uint32_t op = c.new_lds_op(wave, st, inst, access == Access::atomic);
    c.access(wave, st, inst, address, lanes, bytes,
             access == Access::load    ? Use::read
             : access == Access::store ? Use::write
                                       : Use::atomic,
             op, dword);
    // Definedness travels with the data.
    const uint32_t count = (bytes + 3) / 4;
    uint8_t* defined = c.defined.data();
    if (access != Access::store) {
        uint64_t all = kAll;
        if (bytes == 16) {
            Half both = {kAll, kAll};
            for (uint64_t left = lanes; left; left &= left - 1) {
                Half value;
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
        whole = Impl::data_defined(st, inst, 0, 0, true);
        for (uint32_t k = 0; k < count && dword + k < 16; ++k) whole &= st.loaded[dword + k];
    } else {
        whole = Impl::data_defined(st, inst, dword, count, false);
    }
    if ((lanes & ~whole) == 0) {
        auto mark = [&](auto ones) {
            for (uint64_t left = lanes; left; left &= left - 1)
                std::memcpy(defined + address[std::countr_zero(left)], &ones, sizeof ones);
        };
        if (bytes == 16)
            mark(Half{kAll, kAll});
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
        const uint64_t good = atomic ? whole : Impl::data_defined(st, inst, dword + k, 1, false);
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
        c.report(wave, inst, "LDS out of bounds", [&] {
            return to_string(inst) + " writes LDS byte " + hex(address[std::countr_zero(outside)]) +
                   " in " + lanes_text(outside) + "; the workgroup has " +
                   std::to_string(c.lds_bytes) + " bytes";
        });
        lanes &= ~outside;
    }
    if (!lanes) return;
    st.dma_op = Impl::new_op(c.dma_ops, wave, inst, false);
    c.access(wave, st, inst, address, lanes, 4, Use::dma, st.dma_op);
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        std::memset(c.defined.data() + address[lane], st.loaded[0] >> lane & 1 ? 0xff : 0, 4);
    }
}

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
    if (access == Access::atomic) {
        uint64_t bad = 0;
        for (uint64_t left = lanes; left; left &= left - 1) {
            const int lane = std::countr_zero(left);
            if (address[lane] % bytes) bad |= 1ull << lane;
        }
        if (bad) {
            c.report(wave, inst, "misaligned", [&] {
                return to_string(inst) + " at " + hex(address[std::countr_zero(bad)]) + " in " +
                       lanes_text(bad);
            });
            lanes &= ~bad;
        }
    }
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
        if ((lanes & ~Impl::data_defined(st, inst, dword, count, atomic)) != 0) {
            const Operand& data = inst.src[1];
            const int first = atomic ? 0 : static_cast<int>(dword);
            const int last = atomic ? data.dwords : static_cast<int>(dword + count);
            for (int k = first; k < last && k < data.dwords; ++k)
                c.need_vector(wave, st, inst, data.index + k, lanes, "data to store");
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
                const uint64_t good = Impl::data_defined(st, inst, k, 1, atomic);
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
