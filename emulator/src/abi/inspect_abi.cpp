// C functions for Python: look into code objects and launches, and run single snippets of code.
//
// Functions that return text give JSON in memory that the caller returns with lae_free; null means
// an error, and lae_last_error says which. All are safe to call from several threads.
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "abi/device.h"
#include "abi/hip_types.h"
#include "abi/json.h"
#include "abi/recording.h"
#include "abi/report_json.h"
#include "abi/text.h"
#include "isa/listing.h"

using namespace emulator;

// Sets an option ("check", "count", "threads", "order", "variant", "steps") for all later launches
// of the process; "" returns to the environment's value. 0, or -1 for a bad name or value.
EXPORT int lae_set_option(const char* name, const char* value) {
    try {
        Device::get().set_option(name, value);
        return 0;
    } catch (const std::exception& problem) {
        last_text_error() = problem.what();
        return -1;
    }
}

// {"target", "version", "kernels": [...]} of a code object or offload bundle.
EXPORT char* lae_kernels(const void* image, size_t bytes) {
    return text_of([&] {
        CodeObject object(image, bytes);
        object.bind(handlers(Device::get().options().variant), trap);
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
        Members out, kernels;
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
        out.field("lines", lines_json(object));
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
        const Options options = recording(Device::get().options(), "");
        forget_recording();
        Code code = decode(static_cast<const uint8_t*>(text), bytes);
        code.address = reinterpret_cast<uint64_t>(text);
        const Handler* table = handlers(options.variant);
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
        keep_recording(report, code);
        return report_json(report, code, nullptr, nullptr);
    });
}
