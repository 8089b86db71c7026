// gfx942 code objects: ELF image, kernels and their descriptors, metadata and source lines.
//
// Layouts follow LLVM's "User Guide for AMDGPU Backend": ELF code object, kernel descriptor,
// code object V5 and V6 metadata.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "isa/decode.h"
#include "loader/errors.h"
#include "loader/kernel.h"
#include "loader/line_table.h"

namespace emulator {

// Bytes that one loadable segment of the image takes.
struct Segment {
    const uint8_t* begin;
    uint64_t bytes;
    bool writable;
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
    std::string line(uint32_t offset) const { return lines_.at(text_address_ + offset); }
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
    LineTable lines_;
};

}  // namespace emulator
