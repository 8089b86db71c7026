// Metadata of kernels: MessagePack in an ELF note.
#include <algorithm>
#include <string_view>
#include <utility>

#include "loader/kernel.h"
#include "loader/reader.h"

namespace emulator {
namespace {

constexpr uint32_t kNoteMetadata = 32;

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
    else if (tag == 0xc3)
        value.number = 1;
    else if (tag >= 0xc4 && tag <= 0xc6)
        text(in.big_endian(1 << (tag - 0xc4)));
    else if (tag >= 0xd9 && tag <= 0xdb)
        text(in.big_endian(1 << (tag - 0xd9)));
    else if (tag == 0xca || tag == 0xcb)  // floats: no metadata of ours
        in.take(tag == 0xca ? 4 : 8);
    else if (tag >= 0xcc && tag <= 0xd3)  // unsigned, then signed
        value.number = in.big_endian(1 << (tag & 3));
    else if (tag == 0xdc || tag == 0xdd)
        list(in.big_endian(tag == 0xdc ? 2 : 4));
    else if (tag == 0xde || tag == 0xdf)
        map(in.big_endian(tag == 0xde ? 2 : 4));
    else if (tag != 0xc0 && tag != 0xc2)  // nil and false
        throw BadCodeObject("metadata has an unknown MessagePack tag");
    return value;
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

void read_metadata(const uint8_t* note, size_t size, std::vector<Kernel>& kernels) {
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
        const Value* entries = root.find("amdhsa.kernels");
        if (!entries) continue;
        for (const Value& entry : entries->list) {
            const std::string symbol = entry.text_or(".symbol", "");
            for (Kernel& kernel : kernels) {
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

}  // namespace emulator
