// Source lines of machine code: DWARF line tables of versions 2 to 5.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace emulator {

using Bytes = std::pair<const uint8_t*, size_t>;

class LineTable {
   public:
    // Of the sections .debug_line, .debug_str and .debug_line_str. Throws BadCodeObject.
    void read(Bytes debug_line, Bytes strings, Bytes line_strings);
    void clear() { rows_.clear(); }
    // "file.hip:123" for an ELF address, "" when it is not known.
    std::string at(uint64_t address) const;

   private:
    struct Row {
        uint64_t address = 0;
        uint32_t file = 0, line = 0;  // line 0: none
    };
    std::vector<Row> rows_;  // ascending addresses
    std::vector<std::string> files_;
};

}  // namespace emulator
