// C functions for Python: look into code objects and launches, and run single snippets of code.
//
// Functions that return text give JSON in memory that the caller returns with lae_free; null means
// an error, and lae_last_error says which. All are safe to call from several threads.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "abi/device.h"
#include "isa/listing.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {
namespace {

std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            char code[8];
            std::snprintf(code, sizeof code, "\\u%04x", c);
            out += code;
        } else {
            out += c;
        }
    }
    return out + "\"";
}

// Comma-separated members of an object or array.
class Members {
   public:
    void field(const char* key, const std::string& json) {
        next();
        out_ += '"';
        out_ += key;
        out_ += "\":" + json;
    }
    void field(const char* key, uint64_t value) { field(key, std::to_string(value)); }
    void item(const std::string& json) {
        next();
        out_ += json;
    }
    std::string object() const { return "{" + out_ + "}"; }
    std::string list() const { return "[" + out_ + "]"; }

   private:
    void next() {
        if (!out_.empty()) out_ += ',';
    }
    std::string out_;
};

std::string kernel_json(const Kernel& kernel) {
    Members out, arguments, missing;
    for (const Argument& argument : kernel.arguments) {
        Members fields;
        fields.field("name", quoted(argument.name));
        fields.field("kind", quoted(argument.kind));
        fields.field("offset", argument.offset);
        fields.field("size", argument.size);
        arguments.item(fields.object());
    }
    for (const std::string& name : kernel.unimplemented) missing.item(quoted(name));
    out.field("name", quoted(kernel.name));
    out.field("entry", kernel.entry);
    out.field("lds_bytes", kernel.lds_bytes);
    out.field("scratch_bytes", kernel.scratch_bytes);
    out.field("kernarg_bytes", kernel.kernarg_bytes);
    out.field("explicit_bytes", kernel.explicit_bytes());
    out.field("max_workgroup", kernel.max_workgroup);
    out.field("sgprs", kernel.sgprs);
    out.field("vgprs", kernel.vgprs);
    out.field("agprs", kernel.agprs);
    out.field("sgpr_spills", kernel.sgpr_spills);
    out.field("vgpr_spills", kernel.vgpr_spills);
    out.field("allocated_vgprs", kernel.allocated_vgprs());
    out.field("accum_offset", kernel.accum_offset());
    out.field("preload_dwords", kernel.preload_dwords);
    out.field("arguments", arguments.list());
    out.field("unimplemented", missing.list());
    return out.object();
}

std::string& last_error() {
    thread_local std::string text;
    return text;
}

char* given(const std::string& text) {
    auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
    if (copy) std::memcpy(copy, text.c_str(), text.size() + 1);
    return copy;
}

template <typename Body>
char* text_of(Body body) {
    try {
        return given(body());
    } catch (const std::exception& problem) {
        last_error() = problem.what();
        return nullptr;
    }
}

}  // namespace

// {"workgroups", "waves", "instructions", "threads", "seconds", "findings": [...],
//  "counters": {...}, "executed": [[offset, unit, name, times, lds phases, bank conflicts], ...],
//  "lds_extents": [[offset, first byte, byte behind the last], ...]}
std::string report_json(const Report& report, const Code& code, const CodeObject* object,
                        const Kernel* kernel) {
    static constexpr const char* kUnits[] = {"salu", "wait",  "barrier", "branch", "smem",
                                             "valu", "trans", "mfma",    "ds",     "vmem"};
    Members out, findings, counters;
    if (kernel) out.field("kernel", quoted(kernel->name));
    out.field("workgroups", report.workgroups);
    out.field("waves", report.waves);
    out.field("instructions", report.instructions);
    out.field("threads", report.threads);
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.9g", report.seconds);
    out.field("seconds", std::string(seconds));
    for (const auto& [key, finding] : report.findings.all()) {
        Members fields;
        fields.field("kind", quoted(finding.kind));
        fields.field("detail", quoted(finding.detail));
        fields.field("offset", finding.offset);
        if (object) {
            fields.field("place", quoted(object->describe(finding.offset)));
            fields.field("line", quoted(object->line(finding.offset)));
        }
        fields.field("wave", finding.wave);
        fields.field("workgroup", finding.workgroup);
        fields.field("count", finding.count);
        findings.item(fields.object());
    }
    out.field("findings", findings.list());
    const Counters& counted = report.counters;
    counters.field("lds_bytes", counted.lds_bytes);
    counters.field("global_load_bytes", counted.global_load_bytes);
    counters.field("global_store_bytes", counted.global_store_bytes);
    counters.field("smem_bytes", counted.smem_bytes);
    counters.field("lds_dma_bytes", counted.lds_dma_bytes);
    counters.field("scratch_bytes", counted.scratch_bytes);
    counters.field("vmem_lines", counted.vmem_lines);
    counters.field("distinct_load_bytes", counted.distinct_load_bytes);
    counters.field("barriers", counted.barriers);
    counters.field("flops", counted.flops);
    out.field("counters", counters.object());
    std::string executed = "[";
    for (size_t i = 0; i < counted.executed.size() && i < code.insts.size(); ++i) {
        if (!counted.executed[i]) continue;
        const Inst& inst = code.insts[i];
        if (executed.size() > 1) executed += ',';
        executed += "[" + std::to_string(inst.offset) + ",\"" +
                    kUnits[static_cast<int>(inst.unit)] + "\",\"" + inst.name + "\"," +
                    std::to_string(counted.executed[i]) + "," +
                    std::to_string(counted.lds_phases[i]) + "," +
                    std::to_string(counted.bank_conflicts[i]) + "]";
    }
    out.field("executed", executed + "]");
    std::string extents = "[";
    for (size_t i = 0; i < counted.lds_extents.size() && i < code.insts.size(); ++i) {
        const Counters::Extent& extent = counted.lds_extents[i];
        if (extent.low >= extent.high) continue;
        if (extents.size() > 1) extents += ',';
        extents += "[" + std::to_string(code.insts[i].offset) + "," + std::to_string(extent.low) +
                   "," + std::to_string(extent.high) + "]";
    }
    out.field("lds_extents", extents + "]");
    return out.object();
}

}  // namespace emulator

using namespace emulator;

EXPORT void lae_free(char* text) { std::free(text); }

// Of the calling thread's latest failed lae_ function.
EXPORT const char* lae_last_error() { return last_error().c_str(); }

// Sets an option ("check", "count", "threads", "order", "variant", "steps") for all later launches
// of the process; "" returns to the environment's value. 0, or -1 for a bad name or value.
EXPORT int lae_set_option(const char* name, const char* value) {
    try {
        Device::get().set_option(name, value);
        return 0;
    } catch (const std::exception& problem) {
        last_error() = problem.what();
        return -1;
    }
}

// {"target", "version", "kernels": [...]} of a code object or offload bundle.
EXPORT char* lae_kernels(const void* image, size_t bytes) {
    return text_of([&] {
        CodeObject object(image, bytes);
        object.bind(handlers_of(Device::get().options()), trap);
        Members out, kernels;
        for (const Kernel& kernel : object.kernels()) kernels.item(kernel_json(kernel));
        out.field("target", quoted(object.target()));
        out.field("version", object.version());
        out.field("kernels", kernels.list());
        return out.object();
    });
}

// {"instructions": [...] as listing.h says, "lines": [[offset, "file:line"], ...] where a line
// begins, "kernels": [{"name", "entry", "reachable": [indices]}]} of a code object.
EXPORT char* lae_disassemble(const void* image, size_t bytes) {
    return text_of([&] {
        const CodeObject object(image, bytes);
        Members out, lines, kernels;
        std::string last;
        for (const Inst& inst : object.code().insts) {
            const std::string line = object.line(inst.offset);
            if (line == last) continue;
            lines.item("[" + std::to_string(inst.offset) + "," + quoted(line) + "]");
            last = line;
        }
        for (const Kernel& kernel : object.kernels()) {
            Members fields, reachable;
            for (const uint32_t index : object.reachable(kernel))
                reachable.item(std::to_string(index));
            fields.field("name", quoted(kernel.name));
            fields.field("entry", kernel.entry);
            fields.field("reachable", reachable.list());
            kernels.item(fields.object());
        }
        out.field("instructions", instructions_json(object.code()));
        out.field("lines", lines.list());
        out.field("kernels", kernels.list());
        return out.object();
    });
}

// The instructions of bare machine code, as listing.h says.
EXPORT char* lae_decode(const void* text, size_t bytes) {
    return text_of(
        [&] { return instructions_json(decode(static_cast<const uint8_t*>(text), bytes)); });
}

// The calling thread's latest hipModuleLaunchKernel: report_json, or {} when it did not run.
EXPORT char* lae_last_launch() {
    return text_of([&] {
        const Latest& latest = Device::latest();
        if (!latest.report) return std::string("{}");
        const CodeObject& object = latest.module->object;
        return report_json(*latest.report, object.code(), &object, latest.kernel);
    });
}

// Sets out[i] to 1 where the calling thread's latest launch stored to byte begin + i, else to 0.
// -1 when it did not run, or ran without checks, which note the stores.
EXPORT int lae_stored(const void* begin, size_t bytes, uint8_t* out) {
    const Latest& latest = Device::latest();
    if (!latest.report || !latest.report->checked) return -1;
    const StoredBytes& stored = latest.report->stored;
    const auto first = reinterpret_cast<uint64_t>(begin);
    for (uint64_t at = first; at < first + bytes; ++at) {
        const auto page = stored.find(at / kPageBytes);
        const uint64_t byte = at % kPageBytes;
        out[at - first] = page != stored.end() && page->second[byte / 64] >> byte % 64 & 1;
    }
    return 0;
}

// Runs bare machine code as one workgroup of `waves` waves from its first instruction on, until all
// have executed s_endpgm. Registers go in and come out:
//   vector   uint32 [waves][512][64], AGPRs from 256   scalar   uint32 [waves][128], EXEC at 126
//   scc      uint32 [waves]                            mode     uint32 [waves]
// All of them count as written. `lds` (lds_bytes) too is read before and written after the run;
// `scratch_bytes` is private memory per lane. Global memory is what is registered with the device.
EXPORT char* lae_run_snippet(const void* text, size_t bytes, uint32_t waves, uint32_t* vector,
                             uint32_t* scalar, uint32_t* scc, uint32_t* mode, uint8_t* lds,
                             size_t lds_bytes, uint32_t scratch_bytes) {
    return text_of([&] {
        if (waves == 0 || waves > 16) throw std::invalid_argument("waves must be 1 to 16");
        if (lds_bytes > 65536) throw std::invalid_argument("there are 65536 bytes of LDS");
        const Options options = Device::get().options();
        Code code = decode(static_cast<const uint8_t*>(text), bytes);
        code.address = reinterpret_cast<uint64_t>(text);
        const Handler* table = handlers_of(options);
        for (Inst& inst : code.insts) {
            const Handler handler =
                inst.op == Op::unknown ? nullptr : table[static_cast<size_t>(inst.op)];
            inst.run = handler ? handler : trap;
        }
        const std::unique_ptr<Wave[]> storage(new Wave[waves]);
        std::vector<uint8_t> scratch(size_t{scratch_bytes} * kLanes * waves);
        std::vector<Wave*> list;
        for (uint32_t i = 0; i < waves; ++i) {
            Wave& wave = storage[i];
            std::memcpy(wave.v, vector + size_t{i} * kVectorRegisters * kLanes, sizeof wave.v);
            std::memcpy(wave.s, scalar + size_t{i} * kScalarRegisters, sizeof wave.s);
            wave.scc = scc[i] != 0;
            wave.mode = mode[i];
            wave.scratch = scratch.data() + size_t{i} * scratch_bytes * kLanes;
            wave.scratch_bytes = scratch_bytes;
            list.push_back(&wave);
        }
        std::vector<uint8_t> local(lds, lds + lds_bytes);
        Report report;
        run_bare(nullptr, code, list, local, Device::get().memory, options, report);
        for (uint32_t i = 0; i < waves; ++i) {
            const Wave& wave = storage[i];
            std::memcpy(vector + size_t{i} * kVectorRegisters * kLanes, wave.v, sizeof wave.v);
            std::memcpy(scalar + size_t{i} * kScalarRegisters, wave.s, sizeof wave.s);
            scc[i] = wave.scc;
            mode[i] = wave.mode;
        }
        if (lds_bytes) std::memcpy(lds, local.data(), lds_bytes);
        return report_json(report, code, nullptr, nullptr);
    });
}
