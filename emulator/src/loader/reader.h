// Reading binary data that may be damaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "loader/errors.h"

namespace emulator {

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

// The T at `offset` of an image.
template <typename T>
T at(const uint8_t* data, size_t size, uint64_t offset, const char* what) {
    if (offset > size || size - offset < sizeof(T))
        throw BadCodeObject(std::string(what) + " lies outside the image");
    T value;
    std::memcpy(&value, data + offset, sizeof value);
    return value;
}

}  // namespace emulator
