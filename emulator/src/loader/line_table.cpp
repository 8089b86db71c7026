#include "loader/line_table.h"

#include <algorithm>
#include <iterator>

#include "loader/reader.h"

namespace emulator {
namespace {

// Bytes of an attribute whose form has a fixed size.
int fixed_size(uint64_t form) {
    switch (form) {
        case 0x0b:
            return 1;
        case 0x05:
            return 2;
        case 0x06:
            return 4;
        case 0x07:
            return 8;
        case 0x1e:
            return 16;
        default:
            throw BadCodeObject(".debug_line has an unknown form");
    }
}

}  // namespace

void LineTable::read(Bytes debug_line, Bytes strings, Bytes line_strings) {
    Reader all(debug_line.first, debug_line.second, ".debug_line");
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

        auto pooled = [](Bytes pool, uint64_t from) {
            std::string text;
            for (; from < pool.second && pool.first[from]; ++from)
                text += static_cast<char>(pool.first[from]);
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
                                text = pooled(strings, offset(in));
                                break;  // strp
                            case 0x1f:
                                text = pooled(line_strings, offset(in));
                                break;
                            case 0x0f:
                                in.uleb();
                                break;
                            case 0x09:
                                in.take(in.uleb());
                                break;
                            default:
                                in.take(fixed_size(form));
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

        Row row;
        auto reset = [&] { row = {0, 1, 1}; };
        auto emit = [&](bool end) {
            const uint32_t file = row.file < files.size() ? files[row.file] : 0;
            rows_.push_back({row.address, file, end ? 0 : row.line});
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
    std::stable_sort(rows_.begin(), rows_.end(),
                     [](const Row& a, const Row& b) { return a.address < b.address; });
}

std::string LineTable::at(uint64_t address) const {
    auto after =
        std::upper_bound(rows_.begin(), rows_.end(), address,
                         [](uint64_t value, const Row& row) { return value < row.address; });
    if (after == rows_.begin()) return "";
    const Row& row = *std::prev(after);
    if (row.line == 0) return "";
    return files_[row.file] + ":" + std::to_string(row.line);
}

}  // namespace emulator
