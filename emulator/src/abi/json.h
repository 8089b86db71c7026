// Writing JSON.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace emulator {

// Comma-separated members of an object or array.
class Members {
   public:
    void field(const char* key, const std::string& json) {
        next();
        out_ += '"';
        out_ += key;
        out_ += "\":" + json;
    }
    void field(const char* key, uint64_t value) { field(key, std::to_string(value)); }
    void item(const std::string& json) {
        next();
        out_ += json;
    }
    std::string object() const { return "{" + out_ + "}"; }
    std::string list() const { return "[" + out_ + "]"; }

   private:
    void next() {
        if (!out_.empty()) out_ += ',';
    }
    std::string out_;
};

inline std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20) {
            char code[8];
            std::snprintf(code, sizeof code, "\\u%04x", c);
            out += code;
        } else {
            out += c;
        }
    }
    return out + "\"";
}

}  // namespace emulator
