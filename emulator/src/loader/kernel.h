// What a code object says of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "isa/decode.h"

namespace emulator {

struct Argument {
    std::string name, kind;  // kind: "by_value", "global_buffer", "hidden_block_count_x", ...
    uint32_t offset = 0, size = 0;
    bool hidden() const { return kind.rfind("hidden_", 0) == 0; }
};

// A kernel: its descriptor's fields and its metadata.
struct Kernel {
    std::string name;
    uint32_t entry = 0;  // byte offset in the text section
    uint32_t lds_bytes = 0, scratch_bytes = 0, kernarg_bytes = 0, kernarg_align = 16;
    uint32_t rsrc1 = 0, rsrc2 = 0, rsrc3 = 0, properties = 0;
    uint32_t preload_dwords = 0, preload_offset = 0;  // kernarg preload into SGPRs, in dwords
    uint32_t max_workgroup = 1024;
    uint32_t required_workgroup[3] = {0, 0, 0};                                  // 0: any
    uint32_t sgprs = 0, vgprs = 0, agprs = 0, sgpr_spills = 0, vgpr_spills = 0;  // as metadata says
    bool dynamic_stack = false;
    // Of the code that it can reach, known once the object is bound:
    std::vector<std::string> unimplemented;     // mnemonics without handler; sorted, no repeats
    uint32_t named_vgprs = 0, named_agprs = 0;  // one more than the highest register named
    std::vector<Argument> arguments;
    // Its code where it names registers of the unified file both as VGPRs and as AGPRs, else null.
    std::shared_ptr<const Code> unified;

    // Registers of the unified file that a wave gets, and where its AGPRs begin there.
    uint32_t allocated_vgprs() const { return ((rsrc1 & 63) + 1) * 8; }
    uint32_t accum_offset() const { return ((rsrc3 & 63) + 1) * 4; }
    // Bytes of the arguments that a caller passes, up to the first hidden one.
    uint32_t explicit_bytes() const;
};

// Adds to the kernels what the notes of a code object say of them. Throws BadCodeObject.
void read_metadata(const uint8_t* note, size_t size, std::vector<Kernel>& kernels);

}  // namespace emulator
