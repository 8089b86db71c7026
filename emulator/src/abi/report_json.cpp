#include "abi/report_json.h"

#include <cstdio>

#include "abi/json.h"
#include "isa/listing.h"

namespace emulator {

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

std::string lines_json(const CodeObject& object) {
    Members lines;
    std::string last;
    for (const Inst& inst : object.code().insts) {
        const std::string line = object.line(inst.offset);
        if (line == last) continue;
        lines.item("[" + std::to_string(inst.offset) + "," + quoted(line) + "]");
        last = line;
    }
    return lines.list();
}

std::string report_json(const Report& report, const Code& code, const CodeObject* object,
                        const Kernel* kernel) {
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
        executed += "[" + std::to_string(inst.offset) + ",\"" + name_of(inst.unit) + "\",\"" +
                    inst.name + "\"," + std::to_string(counted.executed[i]) + "," +
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
