#include "loader/code_object.h"

#include <elf.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <set>
#include <string_view>
#include <utility>

#include "isa/text.h"

namespace emulator {
namespace {

constexpr uint16_t kMachineAmdgpu = 224;
constexpr uint8_t kAbiHsa = 64;
constexpr uint32_t kMachGfx942 = 0x4c, kMachGfx9_4Generic = 0x5f;
constexpr uint32_t kNoteMetadata = 32;
constexpr uint32_t kAbs32Lo = 1, kAbs32Hi = 2, kAbs64 = 3, kRel32 = 4, kRel64 = 5, kAbs32 = 6,
                   kRel32Lo = 10, kRel32Hi = 11, kRelative64 = 13;
constexpr size_t kPage = 4096;

// Reads little-endian values inside [begin, end); going beyond throws.
class Reader {
   public:
    Reader(const uint8_t* begin, size_t size, const char* what)
        : at_(begin), begin_(begin), end_(begin + size), what_(what) {}

    template <typename T>
    T get() {
        T value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }
    uint64_t big_endian(int bytes) {
        uint64_t value = 0;
        for (int i = 0; i < bytes; ++i) value = value << 8 | get<uint8_t>();
        return value;
    }
    uint64_t uleb() {
        uint64_t value = 0;
        for (int shift = 0;; shift += 7) {
            const uint8_t byte = get<uint8_t>();
            if (shift < 64) value |= static_cast<uint64_t>(byte & 127) << shift;
            if (!(byte & 128)) return value;
        }
    }
    int64_t sleb() {
        uint64_t value = 0;
        for (int shift = 0;;) {
            const uint8_t byte = get<uint8_t>();
            if (shift < 64) value |= static_cast<uint64_t>(byte & 127) << shift;
            shift += 7;
            if (byte & 128) continue;
            if ((byte & 64) && shift < 64) value |= ~uint64_t{0} << shift;
            return static_cast<int64_t>(value);
        }
    }
    std::string string() {
        std::string text;
        while (char c = static_cast<char>(get<uint8_t>())) text += c;
        return text;
    }
    const uint8_t* take(uint64_t bytes) {
        if (bytes > left()) throw BadCodeObject(std::string(what_) + " ends too early");
        const uint8_t* from = at_;
        at_ += bytes;
        return from;
    }
    uint64_t left() const { return static_cast<uint64_t>(end_ - at_); }
    uint64_t position() const { return static_cast<uint64_t>(at_ - begin_); }

   private:
    const uint8_t *at_, *begin_, *end_;
    const char* what_;
};

template <typename T>
T at(const uint8_t* data, size_t size, uint64_t offset, const char* what) {
    if (offset > size || size - offset < sizeof(T))
        throw BadCodeObject(std::string(what) + " lies outside the image");
    T value;
    std::memcpy(&value, data + offset, sizeof value);
    return value;
}

// What a MessagePack document of metadata consists of.
struct Value {
    std::string text;
    uint64_t number = 0;
    std::vector<Value> list;                            // array
    std::vector<std::pair<std::string, Value>> fields;  // map

    const Value* find(std::string_view key) const {
        for (const auto& [name, value] : fields)
            if (name == key) return &value;
        return nullptr;
    }
    uint32_t number_or(std::string_view key, uint32_t fallback) const {
        const Value* found = find(key);
        return found ? static_cast<uint32_t>(found->number) : fallback;
    }
    std::string text_or(std::string_view key, const char* fallback) const {
        const Value* found = find(key);
        return found ? found->text : fallback;
    }
};

Value unpack(Reader& in, int depth = 0) {
    if (depth > 16) throw BadCodeObject("metadata is nested too deeply");
    Value value;
    auto text = [&](uint64_t size) {
        value.text.assign(reinterpret_cast<const char*>(in.take(size)), size);
    };
    auto list = [&](uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) value.list.push_back(unpack(in, depth + 1));
    };
    auto map = [&](uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) {
            std::string key = unpack(in, depth + 1).text;
            value.fields.emplace_back(std::move(key), unpack(in, depth + 1));
        }
    };
    const uint8_t tag = in.get<uint8_t>();
    if (tag < 0x80)
        value.number = tag;
    else if (tag < 0x90)
        map(tag & 15);
    else if (tag < 0xa0)
        list(tag & 15);
    else if (tag < 0xc0)
        text(tag & 31);
    else if (tag >= 0xe0)
        value.number = static_cast<uint64_t>(static_cast<int8_t>(tag));
    else
        switch (tag) {
            case 0xc0:
            case 0xc2:
                break;
            case 0xc3:
                value.number = 1;
                break;
            case 0xc4:
            case 0xd9:
                text(in.big_endian(1));
                break;
            case 0xc5:
            case 0xda:
                text(in.big_endian(2));
                break;
            case 0xc6:
            case 0xdb:
                text(in.big_endian(4));
                break;
            case 0xca:
                in.take(4);
                break;
            case 0xcb:
                in.take(8);
                break;
            case 0xcc:
            case 0xd0:
                value.number = in.big_endian(1);
                break;
            case 0xcd:
            case 0xd1:
                value.number = in.big_endian(2);
                break;
            case 0xce:
            case 0xd2:
                value.number = in.big_endian(4);
                break;
            case 0xcf:
            case 0xd3:
                value.number = in.big_endian(8);
                break;
            case 0xdc:
                list(in.big_endian(2));
                break;
            case 0xdd:
                list(in.big_endian(4));
                break;
            case 0xde:
                map(in.big_endian(2));
                break;
            case 0xdf:
                map(in.big_endian(4));
                break;
            default:
                throw BadCodeObject("metadata has an unknown MessagePack tag");
        }
    return value;
}

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
    char number[16];
    std::snprintf(number, sizeof number, "0x%x", header.e_flags);
    if (mach != kMachGfx942 && mach != kMachGfx9_4Generic)
        throw WrongTarget("code object is not for gfx942 (e_flags " + std::string(number) + ")");
    // The device has xnack off and sramecc on.
    if ((header.e_flags & 0x300) == 0x300)
        throw WrongTarget("code object needs xnack+, the device is gfx942:sramecc+:xnack-");
    if ((header.e_flags & 0xc00) == 0x800)
        throw WrongTarget("code object needs sramecc-, the device is gfx942:sramecc+:xnack-");
}

bool is_elf(const uint8_t* data) { return std::memcmp(data, ELFMAG, SELFMAG) == 0; }

// The entry of an offload bundle that is for this device.
std::pair<const uint8_t*, size_t> unbundle(const uint8_t* image, size_t size) {
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

uint32_t Kernel::explicit_bytes() const {
    uint32_t end = 0;
    bool any = false;
    for (const Argument& argument : arguments) {
        any = true;
        if (!argument.hidden()) end = std::max(end, argument.offset + argument.size);
    }
    return any ? end : kernarg_bytes;
}

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

const Kernel* CodeObject::kernel(const std::string& name) const {
    for (const Kernel& kernel : kernels_)
        if (kernel.name == name) return &kernel;
    return nullptr;
}

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
    auto bytes_of = [&](const Elf64_Shdr& section) -> std::pair<const uint8_t*, size_t> {
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
    std::pair<const uint8_t*, size_t> debug_line{}, debug_str{}, debug_line_str{};
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
        read_metadata(elf + segment.p_offset, segment.p_filesz);
    }
    if (debug_line.second) {
        // Lines serve messages only: a table that is not understood costs the line numbers.
        try {
            read_lines(debug_line.first, debug_line.second, debug_str.first, debug_str.second,
                       debug_line_str.first, debug_line_str.second);
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
            switch (type) {
                case kAbs32Lo:
                case kAbs32Hi:
                case kAbs64:
                case kRel32:
                case kRel64:
                case kAbs32:
                case kRel32Lo:
                case kRel32Hi:
                case kRelative64:
                    std::memcpy(memory_ + place, &value, wide ? 8 : 4);
                    break;
                default:
                    throw BadCodeObject("relocation type " + std::to_string(type) +
                                        " is not supported");
            }
        }
    }
}

void CodeObject::read_metadata(const uint8_t* note, size_t size) {
    Reader in(note, size, "note");
    while (in.left() >= 12) {
        const uint32_t name_bytes = in.get<uint32_t>(), bytes = in.get<uint32_t>();
        const uint32_t type = in.get<uint32_t>();
        const auto* name = reinterpret_cast<const char*>(in.take((name_bytes + 3ull) / 4 * 4));
        const bool ours = type == kNoteMetadata &&
                          std::string_view(name, name_bytes) == std::string_view("AMDGPU\0", 7);
        const uint8_t* body = in.take(bytes);
        in.take(std::min<uint64_t>(in.left(), (4 - bytes % 4) % 4));
        if (!ours) continue;
        Reader document(body, bytes, "metadata");
        const Value root = unpack(document);
        const Value* kernels = root.find("amdhsa.kernels");
        if (!kernels) continue;
        for (const Value& entry : kernels->list) {
            const std::string symbol = entry.text_or(".symbol", "");
            for (Kernel& kernel : kernels_) {
                if (kernel.name + ".kd" != symbol) continue;
                // 0 in the descriptor: the size is not given there.
                if (kernel.kernarg_bytes == 0)
                    kernel.kernarg_bytes = entry.number_or(".kernarg_segment_size", 0);
                kernel.max_workgroup = entry.number_or(".max_flat_workgroup_size", 1024);
                kernel.kernarg_align = std::max(16u, entry.number_or(".kernarg_segment_align", 16));
                kernel.sgprs = entry.number_or(".sgpr_count", 0);
                kernel.vgprs = entry.number_or(".vgpr_count", 0);
                kernel.agprs = entry.number_or(".agpr_count", 0);
                kernel.sgpr_spills = entry.number_or(".sgpr_spill_count", 0);
                kernel.vgpr_spills = entry.number_or(".vgpr_spill_count", 0);
                kernel.dynamic_stack = entry.number_or(".uses_dynamic_stack", 0);
                if (const Value* required = entry.find(".reqd_workgroup_size"))
                    for (size_t i = 0; i < 3 && i < required->list.size(); ++i)
                        kernel.required_workgroup[i] =
                            static_cast<uint32_t>(required->list[i].number);
                if (const Value* arguments = entry.find(".args"))
                    for (const Value& argument : arguments->list)
                        kernel.arguments.push_back({argument.text_or(".name", ""),
                                                    argument.text_or(".value_kind", "by_value"),
                                                    argument.number_or(".offset", 0),
                                                    argument.number_or(".size", 0)});
                for (const Argument& argument : kernel.arguments)
                    if (uint64_t{argument.offset} + argument.size > kernel.kernarg_bytes)
                        throw BadCodeObject("argument of kernel " + kernel.name +
                                            " lies outside its kernarg segment");
            }
        }
    }
}

void CodeObject::read_lines(const uint8_t* debug_line, size_t line_bytes, const uint8_t* strings,
                            size_t string_bytes, const uint8_t* line_strings,
                            size_t line_string_bytes) {
    Reader all(debug_line, line_bytes, ".debug_line");
    while (all.left() > 4) {
        uint64_t length = all.get<uint32_t>();
        const bool wide = length == 0xffffffff;
        if (wide) length = all.get<uint64_t>();
        Reader in(all.take(length), length, ".debug_line");
        auto offset = [&](Reader& from) {
            return wide ? from.get<uint64_t>() : from.get<uint32_t>();
        };
        const uint16_t version = in.get<uint16_t>();
        if (version < 2 || version > 5) continue;
        if (version == 5) in.take(2);  // address and segment selector sizes
        const uint64_t header_length = offset(in);
        const uint64_t program = in.position() + header_length;
        const uint8_t min_instruction = in.get<uint8_t>();
        if (version >= 4) in.take(1);  // operations per instruction: VLIW only
        in.take(1);                    // default is_stmt
        const int8_t line_base = in.get<int8_t>();
        const uint8_t line_range = in.get<uint8_t>(), opcode_base = in.get<uint8_t>();
        if (line_range == 0) throw BadCodeObject(".debug_line has line_range 0");
        std::vector<uint8_t> operands(opcode_base);
        for (int i = 1; i < opcode_base; ++i) operands[i] = in.get<uint8_t>();

        auto pooled = [](const uint8_t* pool, size_t bytes, uint64_t from) {
            std::string text;
            for (; from < bytes && pool[from]; ++from) text += static_cast<char>(pool[from]);
            return text;
        };
        std::vector<uint32_t> files;  // this table's numbers -> files_
        auto add_file = [&](const std::string& path) {
            const std::string name = path.substr(path.find_last_of('/') + 1);
            const auto found = std::find(files_.begin(), files_.end(), name);
            files.push_back(static_cast<uint32_t>(found - files_.begin()));
            if (found == files_.end()) files_.push_back(name);
        };
        if (version == 5) {
            for (const bool names : {false, true}) {  // directories, then files
                std::vector<std::pair<uint64_t, uint64_t>> formats(in.get<uint8_t>());
                for (auto& [content, form] : formats) content = in.uleb(), form = in.uleb();
                const uint64_t count = in.uleb();
                if (formats.empty() && count)
                    throw BadCodeObject(".debug_line has entries without a form");
                for (uint64_t i = 0; i < count; ++i) {
                    std::string path;
                    for (const auto& [content, form] : formats) {
                        std::string text;
                        switch (form) {
                            case 0x08:
                                text = in.string();
                                break;  // string
                            case 0x0e:
                                text = pooled(strings, string_bytes, offset(in));
                                break;  // strp
                            case 0x1f:
                                text = pooled(line_strings, line_string_bytes, offset(in));
                                break;
                            case 0x0b:
                                in.take(1);
                                break;
                            case 0x05:
                                in.take(2);
                                break;
                            case 0x06:
                                in.take(4);
                                break;
                            case 0x07:
                                in.take(8);
                                break;
                            case 0x0f:
                                in.uleb();
                                break;
                            case 0x1e:
                                in.take(16);
                                break;
                            case 0x09:
                                in.take(in.uleb());
                                break;
                            default:
                                throw BadCodeObject(".debug_line has an unknown form");
                        }
                        if (content == 1) path = text;
                    }
                    if (names) add_file(path);
                }
            }
        } else {
            while (!in.string().empty()) {
            }
            add_file("");  // files count from 1
            for (std::string name = in.string(); !name.empty(); name = in.string()) {
                add_file(name);
                for (int i = 0; i < 3; ++i) in.uleb();
            }
        }
        if (in.position() > program) throw BadCodeObject(".debug_line header is too long");
        in.take(program - in.position());

        LineRow row;
        auto reset = [&] { row = {0, 1, 1}; };
        auto emit = [&](bool end) {
            const uint32_t file = row.file < files.size() ? files[row.file] : 0;
            lines_.push_back({row.address, file, end ? 0 : row.line});
        };
        reset();
        while (in.left()) {
            const uint8_t opcode = in.get<uint8_t>();
            if (opcode >= opcode_base) {
                const int adjusted = opcode - opcode_base;
                row.address += static_cast<uint64_t>(adjusted / line_range) * min_instruction;
                row.line += line_base + adjusted % line_range;
                emit(false);
            } else if (opcode == 0) {
                const uint64_t bytes = in.uleb();
                Reader extended(in.take(bytes), bytes, ".debug_line");
                const uint8_t kind = extended.get<uint8_t>();
                if (kind == 1) {
                    emit(true);
                    reset();
                } else if (kind == 2) {
                    row.address = extended.get<uint64_t>();
                }
            } else {
                switch (opcode) {
                    case 1:
                        emit(false);
                        break;
                    case 2:
                        row.address += in.uleb() * min_instruction;
                        break;
                    case 3:
                        row.line += static_cast<uint32_t>(in.sleb());
                        break;
                    case 4:
                        row.file = static_cast<uint32_t>(in.uleb());
                        break;
                    case 8:
                        row.address += static_cast<uint64_t>((255 - opcode_base) / line_range) *
                                       min_instruction;
                        break;
                    case 9:
                        row.address += in.get<uint16_t>();
                        break;
                    default:
                        for (int i = 0; i < operands[opcode]; ++i) in.uleb();
                }
            }
        }
    }
    std::stable_sort(lines_.begin(), lines_.end(),
                     [](const LineRow& a, const LineRow& b) { return a.address < b.address; });
}

std::string CodeObject::line(uint32_t offset) const {
    const uint64_t address = text_address_ + offset;
    auto after =
        std::upper_bound(lines_.begin(), lines_.end(), address,
                         [](uint64_t value, const LineRow& row) { return value < row.address; });
    if (after == lines_.begin()) return "";
    const LineRow& row = *std::prev(after);
    if (row.line == 0) return "";
    return files_[row.file] + ":" + std::to_string(row.line);
}

std::string CodeObject::describe(uint32_t offset) const {
    std::string text;
    const Kernel* inside = nullptr;
    for (const Kernel& kernel : kernels_)
        if (kernel.entry <= offset) inside = &kernel;
    char number[16];
    std::snprintf(number, sizeof number, "+0x%x", offset - (inside ? inside->entry : 0));
    text = (inside ? inside->name : std::string("text")) + number;
    const std::string where = line(offset);
    if (!where.empty()) text += " (" + where + ")";
    const int32_t index = code_.at(offset);
    if (index >= 0) text += ": " + to_string(code_.insts[index]);
    return text;
}

void CodeObject::bind(const Handler* handlers, Handler trap) {
    for (Inst& inst : code_.insts) {
        const Handler handler =
            inst.op == Op::unknown ? nullptr : handlers[static_cast<size_t>(inst.op)];
        inst.run = handler ? handler : trap;
    }
    for (Kernel& kernel : kernels_) {
        std::set<std::string> missing;
        for (const uint32_t index : reachable(kernel)) {
            const Inst& inst = code_.insts[index];
            if (inst.run == trap) missing.insert(inst.name);
            auto names = [&](const Operand& operand) {
                if (operand.kind != Kind::vector) return;
                const uint32_t end = operand.index % 256u + operand.dwords;
                uint32_t& highest = operand.index < 256 ? kernel.named_vgprs : kernel.named_agprs;
                highest = std::max(highest, end);
            };
            for (const Operand& operand : inst.dst) names(operand);
            for (const Operand& operand : inst.src) names(operand);
        }
        kernel.unimplemented.assign(missing.begin(), missing.end());
        if (kernel.named_agprs && kernel.named_vgprs > kernel.accum_offset())
            kernel.unified = unify(kernel);
    }
}

// A copy of the code in which AGPR n is VGPR accum_offset + n, as the hardware's one file has them.
// Only kernels that name a register by both names need it.
std::shared_ptr<const Code> CodeObject::unify(const Kernel& kernel) const {
    auto code = std::make_shared<Code>(code_);
    const auto move = [&](Operand& operand) {
        if (operand.kind == Kind::vector && operand.index >= 256)
            operand.index = static_cast<uint16_t>(operand.index - 256 + kernel.accum_offset());
    };
    for (const uint32_t index : reachable(kernel)) {
        for (Operand& operand : code->insts[index].dst) move(operand);
        for (Operand& operand : code->insts[index].src) move(operand);
    }
    return code;
}

std::vector<uint32_t> CodeObject::reachable(const Kernel& kernel) const {
    const size_t count = code_.insts.size();
    std::vector<bool> seen(count, false);
    std::vector<uint32_t> open;
    auto visit = [&](int64_t index) {
        if (index < 0 || index >= static_cast<int64_t>(count) || seen[index]) return;
        seen[index] = true;
        open.push_back(static_cast<uint32_t>(index));
    };
    visit(code_.at(kernel.entry));
    if (kernel.preload_dwords) visit(code_.at(kernel.entry + 256));
    while (!open.empty()) {
        const uint32_t index = open.back();
        open.pop_back();
        const Inst& inst = code_.insts[index];
        const std::string_view name = inst.name;
        visit(inst.target);
        // Calls and far branches: s_getpc_b64 and then s_add_u32 with the distance.
        if (name == "s_getpc_b64")
            for (uint32_t i = index + 1; i < count && i < index + 4; ++i) {
                const Inst& add = code_.insts[i];
                if (std::string_view(add.name) != "s_add_u32" || add.src[1].kind != Kind::constant)
                    continue;
                const int64_t to =
                    int64_t{inst.offset} + 4 + static_cast<int32_t>(add.src[1].value);
                if (to >= 0 && to < static_cast<int64_t>(text_bytes_)) visit(code_.at(to));
                break;
            }
        if (name != "s_endpgm" && name != "s_branch" && name != "s_setpc_b64") visit(index + 1);
    }
    std::vector<uint32_t> indices;
    for (uint32_t i = 0; i < count; ++i)
        if (seen[i]) indices.push_back(i);
    return indices;
}

}  // namespace emulator
