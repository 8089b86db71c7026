#include "launch/launch.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "check/checker.h"
#include "isa/decode.h"
#include "isa/text.h"
#include "exec/exec.h"

namespace emulator {
namespace {

// What registers and LDS hold before they are written: NaN as f32, f16 and bf16, and no address.
constexpr uint32_t kPoison = 0xfff5fff5;
constexpr uint32_t kMaxLds = 65536;
constexpr uint32_t kMaxWorkgroup = 1024;
// With one half of the waves ahead, the other half gets a turn after this many instructions, so
// that a wave which spins on a word that another wave writes does come to an end.
constexpr uint64_t kAhead = uint64_t{1} << 20;

// Kernel descriptor, kernel_code_properties.
constexpr uint32_t kPrivateSegmentBuffer = 1, kDispatchPtr = 2, kQueuePtr = 4, kKernargPtr = 8,
                   kDispatchId = 16, kFlatScratchInit = 32, kPrivateSegmentSize = 64;

// The wave did what the machine cannot go on from.
struct Fault {
    const char* kind;
    std::string detail;
};

uint64_t number(const std::string& what, const std::string& text) {
    uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size())
        throw std::invalid_argument(what + " must be a number, not '" + text + "'");
    return value;
}

bool flag(const std::string& what, const std::string& text) {
    if (text == "on" || text == "1") return true;
    if (text == "off" || text == "0") return false;
    throw std::invalid_argument(what + " must be on or off, not '" + text + "'");
}

// SplitMix64 (Steele, Lea, Flood 2014).
uint64_t next_random(uint64_t& state) {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

// Runs a wave until it waits, ends or has executed `budget` instructions; returns how many.
template <bool checked, bool counted>
uint64_t advance(Wave& wave, uint64_t budget) {
    const Inst* insts = wave.code->insts.data();
    const size_t size = wave.code->insts.size();
    uint64_t* executed = counted ? wave.counters->executed.data() : nullptr;
    uint64_t done = 0;
    while (done < budget) {
        const uint32_t pc = wave.pc;
        if (pc >= size) throw Fault{"left the code", "the program counter is outside the code"};
        const Inst& inst = insts[pc];
        wave.pc = pc + 1;
        if constexpr (counted) ++executed[pc];
        if constexpr (checked) wave.check->before(wave, inst);
        inst.run(wave, inst);
        if constexpr (checked) wave.check->after(wave, inst);
        ++done;
        if (wave.status != Status::running) break;
    }
    wave.executed += done;
    return done;
}

using Advance = uint64_t (*)(Wave&, uint64_t);

Advance advance_for(const Options& options) {
    if (options.check) return options.count ? advance<true, true> : advance<true, false>;
    return options.count ? advance<false, true> : advance<false, false>;
}

// Picks the next wave and how long it runs. One per running workgroup.
class Scheduler {
   public:
    Scheduler(const Order& order, const std::vector<Wave*>& waves, uint64_t workgroup)
        : order_(order), waves_(waves), random_(order.seed * 0x9e3779b97f4a7c15 + workgroup) {}

    // Null when no wave can run.
    Wave* next(uint64_t& quantum) {
        const size_t count = waves_.size(), half = (count + 1) / 2;
        quantum = order_.quantum;
        switch (order_.kind) {
            case Order::Kind::round_robin:
                return rotate(0, count);
            case Order::Kind::random: {
                size_t runnable = 0;
                for (const Wave* wave : waves_) runnable += wave->status == Status::running;
                if (!runnable) return nullptr;
                quantum = 1 + next_random(random_) % 64;
                size_t pick = next_random(random_) % runnable;
                for (Wave* wave : waves_)
                    if (wave->status == Status::running && pick-- == 0) return wave;
                return nullptr;
            }
            case Order::Kind::first_ahead:
                return ahead(0, half, half, count);
            case Order::Kind::last_ahead:
                return ahead(half, count, 0, half);
        }
        return nullptr;
    }

   private:
    Wave* rotate(size_t begin, size_t end) {
        const size_t count = end - begin;
        for (size_t i = 0; i < count; ++i) {
            const size_t at = begin + (last_ + 1 + i) % count;
            if (waves_[at]->status != Status::running) continue;
            last_ = at - begin;
            return waves_[at];
        }
        return nullptr;
    }
    Wave* ahead(size_t begin, size_t end, size_t other_begin, size_t other_end) {
        if (since_other_ < kAhead) {
            if (Wave* wave = rotate(begin, end)) {
                since_other_ += order_.quantum;
                return wave;
            }
        }
        since_other_ = 0;
        if (Wave* wave = rotate(other_begin, other_end)) return wave;
        return rotate(begin, end);
    }

    Order order_;
    const std::vector<Wave*>& waves_;
    uint64_t random_;
    size_t last_ = SIZE_MAX;
    uint64_t since_other_ = 0;
};

std::string place(const CodeObject* object, const Code& code, uint32_t pc) {
    if (pc >= code.insts.size()) return "outside the code";
    if (object) return object->describe(code.insts[pc].offset);
    return to_string(code.insts[pc]);
}

// Runs the waves of one workgroup to their ends. False when the launch should stop.
bool run_waves(Workgroup& group, Checker* check, const CodeObject* object, const Options& options,
               Report& report, uint64_t& instructions) {
    const Advance step = advance_for(options);
    Scheduler scheduler(options.order, group.waves, group.linear_id);
    const Code& code = *group.waves.front()->code;
    Wave* current = nullptr;
    auto fail = [&](const std::string& kind, const std::string& detail) {
        Finding finding;
        finding.kind = kind;
        finding.detail = detail;
        const uint32_t pc = current ? current->pc - 1 : 0;
        if (pc < code.insts.size()) finding.offset = code.insts[pc].offset;
        finding.wave = current ? current->id : 0;
        finding.workgroup = group.linear_id;
        report.findings.add(finding);
    };
    uint64_t steps = 0;
    try {
        for (;;) {
            uint64_t quantum = 0;
            current = scheduler.next(quantum);
            if (!current) {
                bool waiting = false;
                for (Wave* wave : group.waves) waiting |= wave->status == Status::barrier;
                if (!waiting) break;
                // Every wave that has not ended waits at a barrier.
                if (check) check->release();
                for (Wave* wave : group.waves)
                    if (wave->status == Status::barrier) wave->status = Status::running;
                continue;
            }
            steps += step(*current, quantum);
            if (current->status == Status::barrier) {
                if (current->counters) ++current->counters->barriers;
                if (check) check->arrive(*current);
            } else if (current->status == Status::ended) {
                if (check) check->end(*current);
            }
            if (steps <= options.steps) continue;
            std::string where = "after " + std::to_string(steps) + " instructions of the workgroup";
            for (const Wave* wave : group.waves) {
                where += "; wave " + std::to_string(wave->id);
                if (wave->status == Status::ended)
                    where += " has ended";
                else if (wave->status == Status::barrier)
                    where += " waits behind " + place(object, code, wave->pc - 1);
                else
                    where += " is at " + place(object, code, wave->pc);
            }
            fail("hang", where);
            instructions += steps;
            return false;
        }
    } catch (const Fault& fault) {
        fail(fault.kind, fault.detail);
        instructions += steps;
        return false;
    }
    instructions += steps;
    return true;
}

Counters empty_counters(const Code& code) {
    Counters counters;
    counters.executed.assign(code.insts.size(), 0);
    counters.bank_conflicts.assign(code.insts.size(), 0);
    counters.lds_phases.assign(code.insts.size(), 0);
    return counters;
}

// Floating-point (or integer) operations of one matrix instruction: its mnemonic says the shape,
// v_mfma_f32_16x16x16_bf16 or v_mfma_f32_4x4x4_16b_f16 (16 blocks). Half of a sparse one's are not
// carried out.
uint64_t matrix_flops(const Inst& inst) {
    int m = 0, n = 0, k = 0, blocks = 0;
    const bool sparse = std::strncmp(inst.name, "v_smfmac", 8) == 0;
    const char* shape = std::strchr(inst.name + (sparse ? 9 : 7), '_');
    if (!shape || std::sscanf(shape, "_%dx%dx%d_%db", &m, &n, &k, &blocks) < 3) return 0;
    // "_2b" is a number of blocks, "_bf16" and "_fp8" are no numbers.
    const uint64_t products = uint64_t{1} * m * n * k * std::max(blocks, 1);
    return sparse ? products : 2 * products;
}

void count_flops(Counters& counters, const Code& code) {
    for (size_t i = 0; i < counters.executed.size(); ++i)
        if (counters.executed[i] && code.insts[i].unit == Unit::mfma)
            counters.flops += counters.executed[i] * matrix_flops(code.insts[i]);
}

// Memory that only one launch sees: its arguments and packets.
class Range {
   public:
    Range(Memory& memory, const void* data, size_t bytes, Contents contents)
        : memory_(memory), begin_(reinterpret_cast<uint64_t>(data)) {
        memory_.add(begin_, bytes, contents);
    }
    ~Range() { memory_.remove(begin_); }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

   private:
    Memory& memory_;
    uint64_t begin_;
};

// AQL kernel dispatch packet (HSA Platform System Architecture, 2.9.6).
struct DispatchPacket {
    uint16_t header, setup, workgroup_size[3], reserved0;
    uint32_t grid_size[3], private_bytes, lds_bytes;
    uint64_t kernel_object, kernarg, reserved1, completion_signal;
};
static_assert(sizeof(DispatchPacket) == 64);

template <typename T>
void put(std::vector<uint8_t>& bytes, const Argument& argument, T value) {
    const size_t size = std::min<size_t>(sizeof value, argument.size);
    if (argument.offset + size <= bytes.size())
        std::memcpy(bytes.data() + argument.offset, &value, size);
}

// The kernarg segment: explicit arguments and those that the run-time adds (code object V5). A
// scalar load of three dwords may be widened to four, so that the segment ends on 16 bytes.
std::vector<uint8_t> kernarg_segment(const Launch& launch, uint64_t queue) {
    std::vector<uint8_t> bytes((std::max(launch.kernel->kernarg_bytes, 1u) + 15ull) / 16 * 16, 0);
    std::copy_n(launch.arguments.begin(), std::min(bytes.size(), launch.arguments.size()),
                bytes.begin());
    const uint32_t dimensions = launch.grid[2] * launch.block[2] > 1   ? 3
                                : launch.grid[1] * launch.block[1] > 1 ? 2
                                                                       : 1;
    for (const Argument& argument : launch.kernel->arguments) {
        const std::string& kind = argument.kind;
        if (!argument.hidden()) continue;
        const int axis = kind.back() == 'y' ? 1 : kind.back() == 'z' ? 2 : 0;
        if (kind.starts_with("hidden_block_count_"))
            put(bytes, argument, launch.grid[axis]);
        else if (kind.starts_with("hidden_group_size_"))
            put(bytes, argument, launch.block[axis]);
        else if (kind == "hidden_grid_dims")
            put(bytes, argument, dimensions);
        else if (kind == "hidden_dynamic_lds_size")
            put(bytes, argument, launch.dynamic_lds);
        else if (kind == "hidden_private_base")
            put(bytes, argument, static_cast<uint32_t>(kPrivateBase >> 32));
        else if (kind == "hidden_shared_base")
            put(bytes, argument, static_cast<uint32_t>(kSharedBase >> 32));
        else if (kind == "hidden_queue_ptr")
            put(bytes, argument, queue);
        // Workgroups are whole and offsets zero: hidden_remainder_*, hidden_global_offset_* stay 0.
        // No printf, hostcall, heap, default queue or multi-grid: null.
    }
    return bytes;
}

// Padding, and what nobody passed to a kernel without metadata of its arguments, stays undefined.
void mark_arguments(Memory& memory, const Launch& launch, uint64_t segment) {
    if (launch.kernel->arguments.empty()) memory.mark_written(segment, launch.arguments.size());
    for (const Argument& argument : launch.kernel->arguments) {
        // Whole dwords: compilers load a dword for an argument of a byte.
        const uint64_t begin = argument.offset / 4 * 4,
                       end = (uint64_t{argument.offset} + argument.size + 3) / 4 * 4;
        memory.mark_written(segment + begin, end - begin);
    }
}

struct Dispatch {
    const Launch& launch;
    const Options& options;
    Memory& memory;
    Report& report;
    uint64_t kernarg, packet, queue;
    uint32_t work_items, wave_count, lds_bytes;
};

// Registers that a wave starts with; see "Initial Kernel Execution State" of LLVM's guide.
void start(Wave& wave, const Dispatch& dispatch, const Workgroup& group) {
    const Kernel& kernel = *dispatch.launch.kernel;
    Checker* check = wave.check;
    const uint32_t total = kernel.allocated_vgprs(), arch = std::min(kernel.accum_offset(), total);
    std::fill_n(&wave.v[0][0], size_t{std::min(arch, 256u)} * kLanes, kPoison);
    std::fill_n(&wave.v[256][0], size_t{std::min(total - arch, 256u)} * kLanes, kPoison);
    std::fill_n(wave.s, kScalarRegisters, kPoison);
    wave.pc = static_cast<uint32_t>(dispatch.launch.object->code(*dispatch.launch.kernel)
                                        .at(kernel.entry + (kernel.preload_dwords ? 256 : 0)));
    wave.scc = false;
    wave.status = Status::running;
    wave.mode = (kernel.rsrc1 >> 12 & 0xff) | (kernel.rsrc1 >> 21 & 1) << 8 |
                (kernel.rsrc1 >> 23 & 1) << 9 | (kernel.rsrc1 >> 26 & 1) << 23;
    wave.executed = 0;

    int next = 0;
    auto scalar = [&](uint32_t value) {
        wave.s[next] = value;
        if (check) check->define_scalar(wave, next, 1);
        ++next;
    };
    auto pair = [&](uint64_t value) {
        scalar(static_cast<uint32_t>(value));
        scalar(static_cast<uint32_t>(value >> 32));
    };
    const uint32_t properties = kernel.properties;
    if (properties & kPrivateSegmentBuffer) pair(0), pair(0);
    if (properties & kDispatchPtr) pair(dispatch.packet);
    if (properties & kQueuePtr) pair(dispatch.queue);
    if (properties & kKernargPtr) pair(dispatch.kernarg);
    if (properties & kDispatchId) pair(0);
    if (properties & kFlatScratchInit) pair(reinterpret_cast<uint64_t>(wave.scratch));
    if (properties & kPrivateSegmentSize) scalar(kernel.scratch_bytes);
    for (uint32_t i = 0; i < kernel.preload_dwords && next < 16; ++i) {
        const uint64_t at = dispatch.kernarg + 4ull * (kernel.preload_offset + i);
        if (dispatch.memory.written(at, 4))
            scalar(*reinterpret_cast<const uint32_t*>(at));
        else
            ++next;
    }
    next = static_cast<int>(kernel.rsrc2 >> 1 & 31);
    for (int axis = 0; axis < 3; ++axis)
        if (kernel.rsrc2 >> (7 + axis) & 1) scalar(group.id[axis]);
    if (kernel.rsrc2 >> 10 & 1) scalar(0);
    // Architected flat scratch: no wave offset SGPR, FLAT_SCRATCH is set.
    wave.set_pair(kFlatScratch, reinterpret_cast<uint64_t>(wave.scratch));

    const uint32_t first = wave.id * kLanes;
    const uint32_t lanes = std::min<uint32_t>(kLanes, dispatch.work_items - first);
    wave.set_pair(kExec, lanes == 64 ? ~uint64_t{0} : (uint64_t{1} << lanes) - 1);
    const uint32_t* block = dispatch.launch.block;
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
        const uint32_t item = first + lane;
        wave.v[0][lane] = item % block[0] | item / block[0] % block[1] << 10 |
                          item / (block[0] * block[1]) % 1024 << 20;
    }
    if (check) {
        check->define_scalar(wave, kFlatScratch, 2);
        check->define_scalar(wave, kExec, 2);
        check->define_vector(wave, 0, 1);
    }
}

// What one host thread needs to run workgroups one after another.
class Worker {
   public:
    Worker(const Dispatch& dispatch, GlobalRaces& races)
        : dispatch_(dispatch), races_(races), waves_(new Wave[dispatch.wave_count]) {
        const Kernel& kernel = *dispatch.launch.kernel;
        // A function that the compiler does not see through gets the stack that hardware queues
        // give.
        scratch_bytes_ = kernel.scratch_bytes;
        if (kernel.dynamic_stack) scratch_bytes_ = std::max(scratch_bytes_, 16384u);
        scratch_.resize(size_t{scratch_bytes_} * kLanes * dispatch.wave_count);
        if (dispatch.options.count)
            counters_ = empty_counters(dispatch.launch.object->code(*dispatch.launch.kernel));
        for (uint32_t i = 0; i < dispatch.wave_count; ++i) {
            Wave& wave = waves_[i];
            wave.id = static_cast<uint16_t>(i);
            wave.code = &dispatch.launch.object->code(*dispatch.launch.kernel);
            wave.group = &group_;
            wave.memory = &dispatch.memory;
            wave.counters = dispatch.options.count ? &counters_ : nullptr;
            wave.scratch = scratch_.data() + size_t{i} * scratch_bytes_ * kLanes;
            wave.scratch_bytes = scratch_bytes_;
            group_.waves.push_back(&wave);
        }
    }

    // False when the launch should stop.
    bool run(uint64_t linear) {
        const uint32_t* grid = dispatch_.launch.grid;
        group_.linear_id = linear;
        group_.id[0] = static_cast<uint32_t>(linear % grid[0]);
        group_.id[1] = static_cast<uint32_t>(linear / grid[0] % grid[1]);
        group_.id[2] = static_cast<uint32_t>(linear / grid[0] / grid[1]);
        group_.lds.assign(dispatch_.lds_bytes, 0);
        counters_.begin_workgroup();
        poison(group_.lds);
        poison(scratch_);
        std::unique_ptr<Checker> check;
        if (dispatch_.options.check)
            check = std::make_unique<Checker>(group_, dispatch_.memory, dispatch_.report.findings,
                                              &accesses_);
        accesses_.begin(static_cast<uint32_t>(linear));
        for (Wave* wave : group_.waves) {
            wave->check = check.get();
            start(*wave, dispatch_, group_);
        }
        if (!run_waves(group_, check.get(), dispatch_.launch.object, dispatch_.options,
                       dispatch_.report, instructions_))
            return false;
        if (check) races_.join(accesses_);
        return true;
    }

    const Counters& counters() const { return counters_; }
    uint64_t instructions() const { return instructions_; }

   private:
    static void poison(std::vector<uint8_t>& bytes) {
        size_t i = 0;
        for (; i + 4 <= bytes.size(); i += 4) std::memcpy(&bytes[i], &kPoison, 4);
        for (; i < bytes.size(); ++i) bytes[i] = 0xf5;
    }

    const Dispatch& dispatch_;
    GlobalRaces& races_;
    GlobalAccesses accesses_;
    std::unique_ptr<Wave[]> waves_;
    std::vector<uint8_t> scratch_;
    uint32_t scratch_bytes_ = 0;
    Workgroup group_;
    Counters counters_;
    uint64_t instructions_ = 0;
};

}  // namespace

Order Order::parse(const std::string& text) {
    Order order;
    const size_t colon = text.find(':');
    const std::string name = text.substr(0, colon);
    const bool more = colon != std::string::npos;
    const std::string rest = more ? text.substr(colon + 1) : "";
    if (name == "round-robin") {
        if (more)
            order.quantum = static_cast<uint32_t>(
                std::min<uint64_t>(number("quantum of order round-robin", rest), 1u << 30));
        if (order.quantum == 0)
            throw std::invalid_argument("quantum of order round-robin must be > 0");
        return order;
    }
    if (name == "random" && more) {
        order.kind = Kind::random;
        order.seed = number("seed of order random", rest);
        return order;
    }
    if (!more && (name == "first-ahead" || name == "last-ahead")) {
        order.kind = name == "first-ahead" ? Kind::first_ahead : Kind::last_ahead;
        return order;
    }
    throw std::invalid_argument("order '" + text +
                                "' is none of round-robin[:QUANTUM], random:SEED, first-ahead, "
                                "last-ahead");
}

void Options::set(const std::string& name, const std::string& value) {
    if (name == "check") {
        check = flag(name, value);
    } else if (name == "count") {
        count = flag(name, value);
    } else if (name == "threads") {
        const uint64_t wanted = number(name, value);
        if (wanted > 1024) throw std::invalid_argument("threads must be at most 1024");
        threads = static_cast<unsigned>(wanted);
    } else if (name == "order") {
        order = Order::parse(value);
    } else if (name == "variant") {
        handlers(value);
        variant = value;
    } else if (name == "steps") {
        steps = number(name, value);
        if (steps == 0) throw std::invalid_argument("steps must be > 0");
    } else {
        throw std::invalid_argument("option '" + name +
                                    "' is none of check, count, threads, order, variant, steps");
    }
}

Options Options::from_environment() {
    Options options;
    bool counted = false;
    for (const char* name : {"check", "count", "threads", "order", "variant", "steps"}) {
        std::string variable = "LITEATTENTION_EMULATOR_";
        for (const char* c = name; *c; ++c) variable += static_cast<char>(*c - 'a' + 'A');
        const char* value = std::getenv(variable.c_str());
        if (!value || !*value) continue;
        try {
            options.set(name, value);
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument(variable + ": " + error.what());
        }
        counted |= std::strcmp(name, "count") == 0;
    }
    if (!counted) options.count = options.check;
    return options;
}

std::string Report::text(const CodeObject& object, const Kernel& kernel) const {
    std::string out;
    for (const auto& [key, finding] : findings.all()) {
        out += kernel.name + ": " + finding.kind + " at " + object.describe(finding.offset) +
               ": workgroup " + std::to_string(finding.workgroup) + ", wave " +
               std::to_string(finding.wave) + ": " + finding.detail;
        if (finding.count > 1) out += " (" + std::to_string(finding.count) + " times)";
        out += '\n';
    }
    return out;
}

std::string objections(const Launch& launch) {
    const Kernel& kernel = *launch.kernel;
    std::string out;
    auto object = [&](const std::string& reason) { out += kernel.name + ": " + reason + "\n"; };
    uint64_t items = 1, groups = 1;
    bool empty = false;
    for (int axis = 0; axis < 3; ++axis) {
        empty |= launch.block[axis] == 0 || launch.grid[axis] == 0;
        items *= std::min(launch.block[axis], 1u << 20);
        groups *= launch.grid[axis];
        const uint32_t required = kernel.required_workgroup[axis];
        if (required && required != launch.block[axis])
            object("workgroup size " + std::to_string(launch.block[axis]) + " on axis " +
                   std::to_string(axis) + " is not the required " + std::to_string(required));
    }
    if (empty) object("grid and block must be at least 1 on every axis");
    const uint32_t most = std::min(kernel.max_workgroup, kMaxWorkgroup);
    if (items > most)
        object("workgroup of " + std::to_string(items) + " work-items, at most " +
               std::to_string(most));
    if (launch.dynamic_lds > kMaxLds || kernel.lds_bytes + launch.dynamic_lds > kMaxLds)
        object("needs " + std::to_string(uint64_t{kernel.lds_bytes} + launch.dynamic_lds) +
               " bytes of LDS, there are 65536");
    if (!kernel.unimplemented.empty()) {
        std::string names;
        for (const std::string& name : kernel.unimplemented)
            names += (names.empty() ? "" : ", ") + name;
        object("uses instructions that are not emulated: " + names);
    }
    // A wave that names a register it does not have faults, or changes another wave's. VGPRs may
    // go on past accum_offset: there they are the AGPRs by another name.
    const uint32_t total = kernel.allocated_vgprs(), arch = std::min(kernel.accum_offset(), total);
    if (kernel.named_vgprs > total || kernel.named_agprs > total - arch)
        object("names " + std::to_string(kernel.named_vgprs) + " VGPRs and " +
               std::to_string(kernel.named_agprs) + " AGPRs, its descriptor allocates " +
               std::to_string(arch) + " and " + std::to_string(total - arch));
    return out;
}

void run(const Launch& launch, Memory& memory, const Options& options, Report& report) {
    const Kernel& kernel = *launch.kernel;
    const auto begin = std::chrono::steady_clock::now();

    std::vector<uint8_t> queue(4096, 0);
    const std::vector<uint8_t> arguments =
        kernarg_segment(launch, reinterpret_cast<uint64_t>(queue.data()));
    const size_t align = std::max<size_t>(64, kernel.kernarg_align);
    std::unique_ptr<uint8_t, void (*)(void*)> segment(
        static_cast<uint8_t*>(
            std::aligned_alloc(align, (arguments.size() + align - 1) / align * align)),
        std::free);
    std::copy(arguments.begin(), arguments.end(), segment.get());
    const auto kernarg = reinterpret_cast<uint64_t>(segment.get());

    alignas(64) DispatchPacket packet{};
    packet.setup = 3;
    for (int axis = 0; axis < 3; ++axis) {
        packet.workgroup_size[axis] = static_cast<uint16_t>(launch.block[axis]);
        packet.grid_size[axis] = launch.grid[axis] * launch.block[axis];
    }
    packet.private_bytes = kernel.scratch_bytes;
    packet.lds_bytes = kernel.lds_bytes + launch.dynamic_lds;
    packet.kernarg = kernarg;

    std::vector<std::unique_ptr<Range>> ranges;
    const auto reachable = [&](const void* begin, size_t bytes, Contents contents) {
        ranges.push_back(std::make_unique<Range>(memory, begin, bytes, contents));
    };
    for (const Segment& part : launch.object->segments())
        reachable(part.begin, part.bytes, {.constant = !part.writable});
    reachable(queue.data(), queue.size(), {});
    reachable(&packet, sizeof packet, {.constant = true});
    reachable(segment.get(), arguments.size(), {.tracked = true, .constant = true});
    mark_arguments(memory, launch, kernarg);

    const uint32_t items = launch.block[0] * launch.block[1] * launch.block[2];
    const Dispatch dispatch{launch,
                            options,
                            memory,
                            report,
                            kernarg,
                            reinterpret_cast<uint64_t>(&packet),
                            reinterpret_cast<uint64_t>(queue.data()),
                            items,
                            (items + kLanes - 1) / kLanes,
                            packet.lds_bytes};
    const uint64_t total = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
    unsigned threads = options.threads ? options.threads : std::thread::hardware_concurrency();
    threads = static_cast<unsigned>(std::clamp<uint64_t>(threads, 1, total));

    if (options.count) report.counters = empty_counters(launch.object->code());
    GlobalRaces races(launch.object->code(kernel), report.findings);
    std::atomic<uint64_t> next{0};
    std::atomic<bool> stop{false};
    std::mutex mutex;
    std::exception_ptr error;
    auto work = [&] {
        try {
            Worker worker(dispatch, races);
            while (!stop.load(std::memory_order_relaxed)) {
                const uint64_t linear = next.fetch_add(1, std::memory_order_relaxed);
                if (linear >= total) break;
                if (!worker.run(linear)) stop = true;
            }
            const std::lock_guard lock(mutex);
            if (options.count) report.counters.add(worker.counters());
            report.instructions += worker.instructions();
        } catch (...) {
            const std::lock_guard lock(mutex);
            error = std::current_exception();
            stop = true;
        }
    };
    std::vector<std::thread> pool;
    for (unsigned i = 1; i < threads; ++i) pool.emplace_back(work);
    work();
    for (std::thread& thread : pool) thread.join();
    if (error) std::rethrow_exception(error);
    report.checked = options.check;
    if (options.check) report.stored = races.stored();
    count_flops(report.counters, launch.object->code());
    report.workgroups = total;
    report.waves = total * dispatch.wave_count;
    report.threads = threads;
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void run_bare(const CodeObject* object, const Code& code, std::vector<Wave*> waves,
              std::vector<uint8_t>& lds, Memory& memory, const Options& options, Report& report) {
    const auto begin = std::chrono::steady_clock::now();
    if (options.count) report.counters = empty_counters(code);
    Workgroup group;
    group.lds.swap(lds);
    group.waves = std::move(waves);
    std::unique_ptr<Checker> check;
    if (options.check) check = std::make_unique<Checker>(group, memory, report.findings, nullptr);
    if (check) check->define_lds();
    for (size_t i = 0; i < group.waves.size(); ++i) {
        Wave& wave = *group.waves[i];
        wave.id = static_cast<uint16_t>(i);
        wave.code = &code;
        wave.group = &group;
        wave.memory = &memory;
        wave.check = check.get();
        wave.counters = options.count ? &report.counters : nullptr;
        if (!check) continue;
        check->define_scalar(wave, 0, kScalarRegisters);
        check->define_vector(wave, 0, kVectorRegisters);
    }
    run_waves(group, check.get(), object, options, report, report.instructions);
    count_flops(report.counters, code);
    lds.swap(group.lds);
    for (Wave* wave : group.waves) wave->check = nullptr;
    report.workgroups = 1;
    report.waves = group.waves.size();
    report.threads = 1;
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

const Handler* handlers_of(const Options& options) { return handlers(options.variant); }

void trap(Wave&, const Inst& inst) {
    throw Fault{"not emulated", std::string("instruction ") + inst.name};
}

}  // namespace emulator
