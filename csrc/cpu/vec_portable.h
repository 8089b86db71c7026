// 4 fp32 lanes in plain C++, for processors without a path of their own. The compiler maps the
// loops onto whatever vectors the baseline has (SSE2 on x86-64, NEON on AArch64).
#pragma once

#include <cmath>
#include <cstring>

struct Vec {
    static constexpr int kLanes = 4;
    float v[4];

    static Vec Load(const float* p) {
        Vec r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    static Vec Set(float x) { return {{x, x, x, x}}; }
    void Store(float* p) const { std::memcpy(p, v, sizeof v); }
    template <class F>
    static Vec Map(F f) {
        Vec r;
        for (int i = 0; i < 4; ++i) r.v[i] = f(i);
        return r;
    }
    template <class F>
    static uint32_t Test(F f) {
        uint32_t lanes = 0;
        for (int i = 0; i < 4; ++i) lanes |= static_cast<uint32_t>(f(i)) << i;
        return lanes;
    }
    friend Vec operator+(Vec a, Vec b) {
        return Map([&](int i) { return a.v[i] + b.v[i]; });
    }
    friend Vec operator-(Vec a, Vec b) {
        return Map([&](int i) { return a.v[i] - b.v[i]; });
    }
    friend Vec operator*(Vec a, Vec b) {
        return Map([&](int i) { return a.v[i] * b.v[i]; });
    }
    friend Vec operator/(Vec a, Vec b) {
        return Map([&](int i) { return a.v[i] / b.v[i]; });
    }
    float Sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
    // Returns b where either is NaN.
    static Vec Max(Vec a, Vec b) {
        return Map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
    }
    static Vec MulAdd(Vec a, Vec b, Vec c) {
        return Map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
    }
    // Lanes where a <= b; false for NaN.
    static uint32_t LessEqual(Vec a, Vec b) {
        return Test([&](int i) { return a.v[i] <= b.v[i]; });
    }
    static uint32_t Equal(Vec a, Vec b) {
        return Test([&](int i) { return a.v[i] == b.v[i]; });
    }
    // yes where the lane's bit is set, else no.
    static Vec Select(uint32_t lanes, Vec yes, Vec no) {
        return Map([&](int i) { return lanes >> i & 1 ? yes.v[i] : no.v[i]; });
    }
    // Splits x into an integer and a rest in [-0.5, 0.5]; |x| < 2^22. Adding 1.5 * 2^23 leaves
    // only the integer part in the mantissa.
    static void Split(Vec x, Vec* whole, Vec* rest) {
        for (int i = 0; i < 4; ++i) {
            const float shifted = x.v[i] + 12582912.0f;
            whole->v[i] = shifted - 12582912.0f;
            rest->v[i] = x.v[i] - whole->v[i];
        }
    }
    // p * 2^whole for whole <= 0, exactly 0 below the normal range.
    static Vec Scale(Vec p, Vec whole) {
        return Map([&](int i) {
            if (whole.v[i] < -126.0f) return 0.0f;
            const float n = whole.v[i] == whole.v[i] ? whole.v[i] : 0.0f;
            const uint32_t bits = static_cast<uint32_t>(static_cast<int>(n) + 127) << 23;
            float factor;
            std::memcpy(&factor, &bits, sizeof factor);
            return p.v[i] * factor;
        });
    }
    static Vec FromBf16(const uint16_t* p) {
        return Map([&](int i) {
            const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
            float x;
            std::memcpy(&x, &bits, sizeof x);
            return x;
        });
    }
    static Vec FromFp16(const uint16_t* p) {
        return Map([&](int i) {
            const uint32_t sign = static_cast<uint32_t>(p[i] & 0x8000u) << 16;
            const uint32_t exponent = p[i] >> 10 & 31, mantissa = p[i] & 1023;
            float x;
            if (exponent == 0) {
                x = std::ldexp(static_cast<float>(mantissa), -24);
                return sign ? -x : x;
            }
            const uint32_t bits =
                sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
            std::memcpy(&x, &bits, sizeof x);
            return x;
        });
    }
    float Largest() const {
        const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
        return a > b ? a : b;
    }
    // Word c in all four lanes.
    static void Spread(Vec x, Vec* to) {
        for (int c = 0; c < 4; ++c) to[c] = Set(x.v[c]);
    }
    // Transposes rows[0 .. 3].
    static void Turn(Vec* rows) {
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < i; ++j) {
                const float x = rows[i].v[j];
                rows[i].v[j] = rows[j].v[i];
                rows[j].v[i] = x;
            }
        }
    }
    static Vec Join(const Vec* parts) { return parts[0]; }
    void ToFp16(uint16_t* p) const {
        for (int i = 0; i < 4; ++i) p[i] = RoundToFp16(v[i]);
    }

   private:
    // Nearest, ties to even.
    static uint16_t RoundToFp16(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        const uint32_t sign = bits >> 16 & 0x8000u;
        bits &= 0x7fffffffu;
        if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (bits >> 13 & 0x1ff));
        if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
        if (bits < 0x38800000u) {  // subnormal: count units of 2^-24
            float magnitude;
            std::memcpy(&magnitude, &bits, sizeof magnitude);
            return static_cast<uint16_t>(
                sign | static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 24))));
        }
        return static_cast<uint16_t>(sign |
                                     (((bits + 0xfffu + (bits >> 13 & 1)) >> 13) - (112u << 10)));
    }
};

// Transposes 16 rows of 16 words at `src` (row stride in words) into `dst`.
static inline void Transpose16x16(const uint32_t* src, int64_t src_stride, uint32_t* dst,
                                  int64_t dst_stride) {
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) dst[j * dst_stride + i] = src[i * src_stride + j];
}
