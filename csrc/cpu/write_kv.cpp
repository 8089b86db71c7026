#include <algorithm>
#include <cmath>
#include <cstring>

#include "ragged.h"
#include "thread_pool.h"

namespace liteattention::cpu {
namespace {

float ToFloat(uint16_t x, DType dtype) {
    if (dtype == DType::kBf16) {
        const uint32_t bits = static_cast<uint32_t>(x) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
    const int exponent = x >> 10 & 31, mantissa = x & 1023;
    const float value = exponent == 31 ? (mantissa ? __builtin_nanf("") : __builtin_inff())
                        : exponent ? std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25)
                                   : std::ldexp(static_cast<float>(mantissa), -24);
    return x & 0x8000 ? -value : value;
}

// Nearest, ties to even, clamped to the largest finite number; NaN stays NaN.
uint8_t ToFp8(float x, KvType type) {
    const auto [mantissa_bits, bias, fnuz, largest] = Fp8FormOf(type);
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isnan(x)) return fnuz ? 0x80 : static_cast<uint8_t>(sign | 0x7f);
    const float magnitude = std::min(std::fabs(x), largest);
    int exponent = 0;
    std::frexp(magnitude, &exponent);  // magnitude = [0.5, 1) * 2^exponent
    exponent = std::max(exponent - 1, 1 - bias);
    // In units of the last place of its binade (of the subnormals below the first one).
    int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
    if (units == 0 && fnuz) return 0;
    if (units >> (mantissa_bits + 1)) {  // rounded up to the next binade
        units >>= 1;
        ++exponent;
    }
    const int normal = units >> mantissa_bits;
    const int field = normal ? exponent + bias : 0;
    return static_cast<uint8_t>(sign | field << mantissa_bits |
                                (units & ((1 << mantissa_bits) - 1)));
}

struct Side {
    const char* from;
    char* to;
    const Strides& row;
    const Strides& cache;
    float scale;
};

void WriteRow(const KvWrite& w, const Side& side, int64_t row, int64_t slot) {
    const int64_t size = w.dtype == DType::kFp32 ? 4 : 2;
    const int64_t page = slot / w.page_size, token = slot - page * w.page_size;
    const char* from = side.from + row * side.row.seq * size;
    const int64_t at = page * side.cache.batch + token * side.cache.seq;
    if (w.kv_type == KvType::kSame) {
        char* to = side.to + at * size;
        if (side.row.head == w.head_dim && side.cache.head == w.head_dim) {
            std::memcpy(to, from, static_cast<size_t>(w.kv_heads * w.head_dim * size));
            return;
        }
        for (int64_t h = 0; h < w.kv_heads; ++h)
            std::memcpy(to + h * side.cache.head * size, from + h * side.row.head * size,
                        static_cast<size_t>(w.head_dim * size));
        return;
    }
    for (int64_t h = 0; h < w.kv_heads; ++h) {
        uint8_t* to = reinterpret_cast<uint8_t*>(side.to) + at + h * side.cache.head;
        const char* head = from + h * side.row.head * size;
        for (int64_t d = 0; d < w.head_dim; ++d) {
            float x;
            if (w.dtype == DType::kFp32) {
                std::memcpy(&x, head + d * 4, sizeof x);
            } else {
                uint16_t half;
                std::memcpy(&half, head + d * 2, sizeof half);
                x = ToFloat(half, w.dtype);
            }
            to[d] = ToFp8(x / side.scale, w.kv_type);
        }
    }
}

}  // namespace

int64_t WriteKv(const KvWrite& w, int threads) {
    const auto slot_of = [&](int64_t row) -> int64_t {
        return w.wide_slots ? static_cast<const int64_t*>(w.slots)[row]
                            : static_cast<const int32_t*>(w.slots)[row];
    };
    for (int64_t row = 0; row < w.rows; ++row)
        if (slot_of(row) >= w.pages * w.page_size) return slot_of(row);
    const Side sides[] = {
        {static_cast<const char*>(w.k), static_cast<char*>(w.k_cache), w.k_strides,
         w.k_cache_strides, static_cast<float>(w.k_scale)},
        {static_cast<const char*>(w.v), static_cast<char*>(w.v_cache), w.v_strides,
         w.v_cache_strides, static_cast<float>(w.v_scale)},
    };
    // Below about 256 KiB a second thread costs more than it copies.
    const int64_t per_thread = std::max<int64_t>(1, (1 << 16) / (w.kv_heads * w.head_dim));
    const int workers =
        static_cast<int>(std::clamp<int64_t>(w.rows / per_thread, 1, std::max(1, threads)));
    ParallelRun(workers, [&](int thread) {
        const int64_t end = w.rows * (thread + 1) / workers;
        for (int64_t row = w.rows * thread / workers; row < end; ++row) {
            const int64_t slot = slot_of(row);
            if (slot < 0) continue;
            for (const Side& side : sides) WriteRow(w, side, row, slot);
        }
    });
    return -1;
}

}  // namespace liteattention::cpu
