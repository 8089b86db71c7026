// Loading a code object: from an ELF file or an offload bundle into memory, relocated.
#include <elf.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>

#include "isa/text.h"
#include "loader/code_object.h"
#include "loader/reader.h"

namespace emulator {
namespace {

constexpr uint16_t kMachineAmdgpu = 224;
constexpr uint8_t kAbiHsa = 64;
constexpr uint32_t kMachGfx942 = 0x4c, kMachGfx9_4Generic = 0x5f;
constexpr uint32_t kAbs32Lo = 1, kAbs32Hi = 2, kAbs64 = 3, kRel32 = 4, kRel64 = 5, kAbs32 = 6,
                   kRel32Lo = 10, kRel32Hi = 11, kRelative64 = 13;
constexpr size_t kPage = 4096;

size_t elf_size(const uint8_t* elf, size_t limit) {
    const auto header = at<Elf64_Ehdr>(elf, limit, 0, "ELF header");
    uint64_t end = header.e_shoff + uint64_t{header.e_shnum} * header.e_shentsize;
    for (int i = 0; i < header.e_phnum; ++i) {
        const auto segment =
            at<Elf64_Phdr>(elf, limit, header.e_phoff + i * sizeof(Elf64_Phdr), "program header");
        end = std::max(end, segment.p_offset + segment.p_filesz);
    }
    return end;
}

void check_target(const Elf64_Ehdr& header) {
    const uint32_t mach = header.e_flags & 0xff;
    if (mach != kMachGfx942 && mach != kMachGfx9_4Generic)
        throw WrongTarget("code object is not for gfx942 (e_flags " + hex(header.e_flags) + ")");
    // The device has xnack off and sramecc on.
    if ((header.e_flags & 0x300) == 0x300)
        throw WrongTarget("code object needs xnack+, the device is gfx942:sramecc+:xnack-");
    if ((header.e_flags & 0xc00) == 0x800)
        throw WrongTarget("code object needs sramecc-, the device is gfx942:sramecc+:xnack-");
}

bool is_elf(const uint8_t* data) { return std::memcmp(data, ELFMAG, SELFMAG) == 0; }

// The entry of an offload bundle that is for this device.
Bytes unbundle(const uint8_t* image, size_t size) {
    Reader in(image, size, "offload bundle");
    in.take(24);
    const uint64_t count = in.get<uint64_t>();
    std::string seen;
    for (uint64_t i = 0; i < count; ++i) {
        const uint64_t offset = in.get<uint64_t>(), bytes = in.get<uint64_t>();
        const uint64_t length = in.get<uint64_t>();
        const std::string id(reinterpret_cast<const char*>(in.take(length)), length);
        const size_t processor = id.find("gfx942");
        const bool fits = processor != std::string::npos &&
                          id.find("xnack+") == std::string::npos &&
                          id.find("sramecc-") == std::string::npos;
        if (!fits) {
            seen += (seen.empty() ? "" : ", ") + id;
            continue;
        }
        if (offset > size || bytes > size - offset)
            throw BadCodeObject("offload bundle entry lies outside the image");
        return {image + offset, bytes};
    }
    throw WrongTarget("offload bundle has nothing for gfx942:sramecc+:xnack-, only " + seen);
}

}  // namespace

CodeObject::CodeObject(const void* image, size_t size) {
    const auto* data = static_cast<const uint8_t*>(image);
    const size_t limit = size ? size : SIZE_MAX / 2;
    if (limit < 64) throw BadCodeObject("image is too small for a code object");
    size_t bytes = size;
    if (std::memcmp(data, "CCOB", 4) == 0)
        throw BadCodeObject("offload bundle is compressed; build with --no-offload-compress");
    if (std::memcmp(data, "__CLANG_OFFLOAD_BUNDLE__", 24) == 0)
        std::tie(data, bytes) = unbundle(data, limit);
    if (!is_elf(data)) throw BadCodeObject("image is neither an ELF file nor an offload bundle");
    if (bytes == 0) bytes = elf_size(data, limit);
    try {
        load(data, bytes);
    } catch (...) {
        if (memory_) munmap(memory_, memory_bytes_);
        throw;
    }
}

CodeObject::~CodeObject() { munmap(memory_, memory_bytes_); }

void CodeObject::load(const uint8_t* elf, size_t size) {
    const auto header = at<Elf64_Ehdr>(elf, size, 0, "ELF header");
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != kMachineAmdgpu ||
        header.e_ident[EI_OSABI] != kAbiHsa || header.e_type != ET_DYN)
        throw BadCodeObject("image is not a linked amdhsa code object");
    check_target(header);
    version_ = header.e_ident[EI_ABIVERSION] + 2u;
    if (version_ < 4 || version_ > 6)
        throw BadCodeObject("code object version " + std::to_string(version_) +
                            " is not supported, only 4, 5 and 6");
    target_ = (header.e_flags & 0xff) == kMachGfx942 ? "gfx942" : "gfx9-4-generic";

    std::vector<Elf64_Phdr> segments;
    uint64_t lowest = UINT64_MAX, highest = 0;
    for (int i = 0; i < header.e_phnum; ++i) {
        const auto segment =
            at<Elf64_Phdr>(elf, size, header.e_phoff + i * sizeof(Elf64_Phdr), "program header");
        segments.push_back(segment);
        if (segment.p_type != PT_LOAD) continue;
        if (segment.p_offset > size || segment.p_filesz > size - segment.p_offset ||
            segment.p_filesz > segment.p_memsz || segment.p_memsz > uint64_t{1} << 32)
            throw BadCodeObject("ELF segment lies outside the image");
        lowest = std::min(lowest, segment.p_vaddr);
        highest = std::max(highest, segment.p_vaddr + segment.p_memsz);
    }
    if (highest == 0 || highest - lowest > uint64_t{1} << 32)
        throw BadCodeObject("ELF file has no sound segments");
    lowest_ = lowest / kPage * kPage;
    memory_bytes_ = (highest - lowest_ + kPage - 1) / kPage * kPage;
    // Zero pages that are only there once something touches them: .bss may be large.
    void* const mapped = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    memory_ = static_cast<uint8_t*>(mapped);
    for (const Elf64_Phdr& segment : segments)
        if (segment.p_type == PT_LOAD)
            std::memcpy(memory_ + (segment.p_vaddr - lowest_), elf + segment.p_offset,
                        segment.p_filesz);
    for (const Elf64_Phdr& segment : segments)
        if (segment.p_type == PT_LOAD && segment.p_memsz)
            segments_.push_back({memory_ + (segment.p_vaddr - lowest_), segment.p_memsz,
                                 (segment.p_flags & PF_W) != 0});

    // Sections: code, symbols, metadata and line tables.
    std::vector<Elf64_Shdr> sections;
    for (int i = 0; i < header.e_shnum; ++i)
        sections.push_back(
            at<Elf64_Shdr>(elf, size, header.e_shoff + i * sizeof(Elf64_Shdr), "section header"));
    auto bytes_of = [&](const Elf64_Shdr& section) -> Bytes {
        if (section.sh_type == SHT_NOBITS) return {nullptr, 0};
        if (section.sh_offset > size || section.sh_size > size - section.sh_offset)
            throw BadCodeObject("ELF section lies outside the image");
        return {elf + section.sh_offset, section.sh_size};
    };
    auto name_in = [&](const Elf64_Shdr& table, uint64_t offset) -> std::string {
        const auto [text, length] = bytes_of(table);
        if (offset >= length) throw BadCodeObject("ELF name lies outside its table");
        return {reinterpret_cast<const char*>(text + offset),
                strnlen(reinterpret_cast<const char*>(text + offset), length - offset)};
    };
    uint64_t code_begin = UINT64_MAX, code_end = 0;
    const Elf64_Shdr* symbols = nullptr;
    Bytes debug_line{}, debug_str{}, debug_line_str{};
    for (const Elf64_Shdr& section : sections) {
        if (section.sh_flags & SHF_EXECINSTR) {
            code_begin = std::min(code_begin, section.sh_addr);
            code_end = std::max(code_end, section.sh_addr + section.sh_size);
        }
        if (section.sh_type == SHT_DYNSYM || (section.sh_type == SHT_SYMTAB && !symbols))
            symbols = &section;
        if (section.sh_type == SHT_PROGBITS && header.e_shstrndx < sections.size()) {
            const std::string name = name_in(sections[header.e_shstrndx], section.sh_name);
            const bool compressed = section.sh_flags & SHF_COMPRESSED;
            if (name == ".debug_line" && !compressed) debug_line = bytes_of(section);
            if (name == ".debug_str" && !compressed) debug_str = bytes_of(section);
            if (name == ".debug_line_str" && !compressed) debug_line_str = bytes_of(section);
        }
    }
    if (code_end == 0) throw BadCodeObject("code object has no code section");
    if (code_end < code_begin || code_end - code_begin > size)
        throw BadCodeObject("code section is larger than the image");
    if (code_begin < lowest_ || code_end > lowest_ + memory_bytes_)
        throw BadCodeObject("code section lies outside the segments");
    if (!symbols || symbols->sh_link >= sections.size())
        throw BadCodeObject("code object has no symbols");
    text_address_ = code_begin;
    text_bytes_ = code_end - code_begin;

    relocate(elf, size);
    code_ = decode(memory_ + (text_address_ - lowest_), text_bytes_);
    code_.address = reinterpret_cast<uint64_t>(memory_) + (text_address_ - lowest_);

    const auto [symbol_data, symbol_bytes] = bytes_of(*symbols);
    for (size_t i = 0; i + sizeof(Elf64_Sym) <= symbol_bytes; i += sizeof(Elf64_Sym)) {
        const auto symbol = at<Elf64_Sym>(symbol_data, symbol_bytes, i, "symbol");
        const std::string name = name_in(sections[symbols->sh_link], symbol.st_name);
        if (name.size() <= 3 || name.compare(name.size() - 3, 3, ".kd") != 0) continue;
        if (symbol.st_value < lowest_ || symbol.st_value + 64 > lowest_ + memory_bytes_)
            throw BadCodeObject("kernel descriptor " + name + " lies outside the segments");
        const uint8_t* descriptor = memory_ + (symbol.st_value - lowest_);
        auto field = [&](int offset) { return at<uint32_t>(descriptor, 64, offset, "descriptor"); };
        Kernel kernel;
        kernel.name = name.substr(0, name.size() - 3);
        kernel.lds_bytes = field(0);
        kernel.scratch_bytes = field(4);
        kernel.kernarg_bytes = field(8);
        kernel.rsrc3 = field(44);
        kernel.rsrc1 = field(48);
        kernel.rsrc2 = field(52);
        kernel.properties = field(56) & 0xffff;
        kernel.preload_dwords = field(56) >> 16 & 127;
        kernel.preload_offset = field(56) >> 23;
        const auto entry = at<int64_t>(descriptor, 64, 16, "descriptor");
        const uint64_t address = symbol.st_value + static_cast<uint64_t>(entry) - text_address_;
        if (address >= text_bytes_ || code_.at(address) < 0)
            throw BadCodeObject("kernel " + kernel.name + " does not begin at an instruction");
        if (kernel.properties >> 10 & 1)
            throw BadCodeObject("kernel " + kernel.name + " wants waves of 32 lanes");
        kernel.entry = static_cast<uint32_t>(address);
        kernels_.push_back(std::move(kernel));
    }
    std::sort(kernels_.begin(), kernels_.end(),
              [](const Kernel& a, const Kernel& b) { return a.entry < b.entry; });

    for (const Elf64_Phdr& segment : segments) {
        if (segment.p_type != PT_NOTE) continue;
        if (segment.p_offset > size || segment.p_filesz > size - segment.p_offset)
            throw BadCodeObject("note segment lies outside the image");
        read_metadata(elf + segment.p_offset, segment.p_filesz, kernels_);
    }
    if (debug_line.second) {
        // Lines serve messages only: a table that is not understood costs the line numbers.
        try {
            lines_.read(debug_line, debug_str, debug_line_str);
        } catch (const BadCodeObject&) {
            lines_.clear();
        }
    }
}

void CodeObject::relocate(const uint8_t* elf, size_t size) {
    const auto header = at<Elf64_Ehdr>(elf, size, 0, "ELF header");
    for (int i = 0; i < header.e_shnum; ++i) {
        const auto section =
            at<Elf64_Shdr>(elf, size, header.e_shoff + i * sizeof(Elf64_Shdr), "section header");
        // Only dynamic relocations (allocated ones) are for the loader.
        if (section.sh_type != SHT_RELA || !(section.sh_flags & SHF_ALLOC)) continue;
        const auto table = at<Elf64_Shdr>(
            elf, size, header.e_shoff + section.sh_link * sizeof(Elf64_Shdr), "symbol table");
        for (uint64_t k = 0; k + sizeof(Elf64_Rela) <= section.sh_size; k += sizeof(Elf64_Rela)) {
            const auto entry = at<Elf64_Rela>(elf, size, section.sh_offset + k, "relocation");
            const uint32_t type = ELF64_R_TYPE(entry.r_info);
            const uint64_t place = entry.r_offset - lowest_;
            const bool wide = type == kAbs64 || type == kRel64 || type == kRelative64;
            if (entry.r_offset < lowest_ || place + (wide ? 8 : 4) > memory_bytes_)
                throw BadCodeObject("relocation lies outside the segments");
            const uint64_t base = reinterpret_cast<uint64_t>(memory_) - lowest_;
            uint64_t target = base;
            if (type != kRelative64) {
                const auto symbol = at<Elf64_Sym>(
                    elf, size, table.sh_offset + ELF64_R_SYM(entry.r_info) * sizeof(Elf64_Sym),
                    "symbol");
                if (symbol.st_shndx == SHN_UNDEF) {
                    const auto names = at<Elf64_Shdr>(
                        elf, size, header.e_shoff + table.sh_link * sizeof(Elf64_Shdr),
                        "string table");
                    std::string name;
                    for (uint64_t c = names.sh_offset + symbol.st_name; c < size && elf[c]; ++c)
                        name += static_cast<char>(elf[c]);
                    throw BadCodeObject("code object needs the undefined symbol " + name);
                }
                target = symbol.st_value + (symbol.st_shndx == SHN_ABS ? 0 : base);
            }
            uint64_t value = target + static_cast<uint64_t>(entry.r_addend);
            if (type == kRel32 || type == kRel64 || type == kRel32Lo || type == kRel32Hi)
                value -= base + entry.r_offset;
            if (type == kAbs32Hi || type == kRel32Hi) value >>= 32;
            if (type < kAbs32Lo || (type > kAbs32 && type < kRel32Lo) ||
                (type > kRel32Hi && type != kRelative64))
                throw BadCodeObject("relocation type " + std::to_string(type) +
                                    " is not supported");
            std::memcpy(memory_ + place, &value, wide ? 8 : 4);
        }
    }
}

}  // namespace emulator
