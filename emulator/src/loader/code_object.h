// gfx942 code objects: ELF image, kernels and their descriptors, metadata and source lines.
//
// Layouts follow LLVM's "User Guide for AMDGPU Backend": ELF code object, kernel descriptor,
// code object V5 and V6 metadata; line tables are DWARF 4 and 5.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa/decode.h"

namespace emulator {

// The image is damaged or uses something that is not supported; the text says what.
class BadCodeObject : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

// The image is sound, but for another processor.
class WrongTarget : public BadCodeObject {
   public:
    using BadCodeObject::BadCodeObject;
};

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

// Bytes that one loadable segment of the image takes.
struct Segment {
    const uint8_t* begin;
    uint64_t bytes;
    bool writable;
};

struct LineRow {
    uint64_t address = 0;  // ELF address
    uint32_t file = 0, line = 0;
};

// A loaded code object. Key: one load; owner: the module or whoever loaded it; immutable after
// construction. Its segments lie in one host buffer at the ELF's relative addresses.
class CodeObject {
   public:
    // A raw ELF code object or an uncompressed offload bundle that has one for gfx942. `size` 0:
    // taken from the image's own headers, as hipModuleLoadData must. Throws BadCodeObject or
    // WrongTarget.
    CodeObject(const void* image, size_t size);
    ~CodeObject();
    CodeObject(const CodeObject&) = delete;
    CodeObject& operator=(const CodeObject&) = delete;

    const Code& code() const { return code_; }
    // What a launch of this kernel executes: the same instructions at the same indices.
    const Code& code(const Kernel& kernel) const {
        return kernel.unified ? *kernel.unified : code_;
    }
    const std::vector<Kernel>& kernels() const { return kernels_; }
    const Kernel* kernel(const std::string& name) const;
    const std::vector<Segment>& segments() const { return segments_; }
    uint32_t version() const { return version_; }  // 4, 5 or 6
    const std::string& target() const { return target_; }

    // "file.hip:123" for a byte offset in the text section, "" without line information.
    std::string line(uint32_t offset) const;
    // "kernel+0x40 (file:line): v_add_f32 v1, v2, v3", for messages.
    std::string describe(uint32_t offset) const;

    // Sets every instruction's handler; those without one get `trap`. Before the first launch.
    void bind(const Handler* handlers, Handler trap);

    // Instructions that a kernel can reach along branches, and along calls and far jumps whose
    // distance s_getpc_b64 and s_add_u32 with a literal give; ascending.
    std::vector<uint32_t> reachable(const Kernel& kernel) const;

   private:
    std::shared_ptr<const Code> unify(const Kernel& kernel) const;
    void load(const uint8_t* elf, size_t size);
    void relocate(const uint8_t* elf, size_t size);
    void read_metadata(const uint8_t* note, size_t size);
    void read_lines(const uint8_t* debug_line, size_t line_bytes, const uint8_t* strings,
                    size_t string_bytes, const uint8_t* line_strings, size_t line_string_bytes);

    uint8_t* memory_ = nullptr;
    size_t memory_bytes_ = 0;
    uint64_t lowest_ = 0;        // ELF address of memory_[0]
    uint64_t text_address_ = 0;  // ELF address of the text section
    uint64_t text_bytes_ = 0;
    uint32_t version_ = 0;
    std::string target_;
    Code code_;
    std::vector<Kernel> kernels_;
    std::vector<Segment> segments_;
    std::vector<LineRow> lines_;  // ascending addresses
    std::vector<std::string> files_;
};

}  // namespace emulator
