// Arithmetic on the lanes of a vector, and numbers to and from fp32.

namespace {

constexpr float kLowest = -__builtin_inff();

inline int64_t Min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t RoundUp(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// 2^x for x <= 0 (log2 units), relative error 8e-8, exactly 1 at 0 and exactly 0 below 2^-150.
// Coefficients: minimax of 2^f on [-1/2, 1/2], degree 6, constant term held at 1.
inline Vec Exp2(Vec x) {
    // The constant first: Max keeps a NaN in its second argument.
    x = Vec::Max(Vec::Set(-200.0f), x);
    Vec whole, f;
    Vec::Split(x, &whole, &f);
    Vec p = Vec::Set(0.00015345812f);
    p = Vec::MulAdd(p, f, Vec::Set(0.0013399931f));
    p = Vec::MulAdd(p, f, Vec::Set(0.009618489f));
    p = Vec::MulAdd(p, f, Vec::Set(0.055503286f));
    p = Vec::MulAdd(p, f, Vec::Set(0.24022646f));
    p = Vec::MulAdd(p, f, Vec::Set(0.6931472f));
    p = Vec::MulAdd(p, f, Vec::Set(1.0f));
    return Vec::Scale(p, whole);
}

// fp32 to bf16, n values. NaN stays NaN (quiet, sign kept) in every mode. Written without branches
// so that the compiler makes vectors of it.
template <Rounding kMode>
inline void ToBf16(const float* from, int n, uint16_t* to) {
    for (int i = 0; i < n; ++i) {
        uint32_t x;
        std::memcpy(&x, from + i, sizeof x);
        const uint32_t nan = 0u - static_cast<uint32_t>((x & 0x7fffffffu) > 0x7f800000u);
        const uint32_t odd = x >> 16 & 1;
        const uint32_t add = kMode == Rounding::kRtne   ? 0x7fffu + odd
                             : kMode == Rounding::kRtna ? 0x8000u
                                                        : 0u;
        const uint32_t rounded = (x + add) >> 16, quiet = x >> 16 | 0x40u;
        to[i] = static_cast<uint16_t>((rounded & ~nan) | (quiet & nan));
    }
}

template <DType kType>
inline void LoadFloats(const char* from, int64_t n, float* to) {
    if constexpr (kType == DType::kFp32) {
        std::memcpy(to, from, static_cast<size_t>(n) * 4);
    } else {
        const uint16_t* half = reinterpret_cast<const uint16_t*>(from);
        for (int64_t i = 0; i < n; i += 8) {  // head dims are multiples of 8
            alignas(64) uint16_t in[16] = {};
            alignas(64) float out[16];
            std::memcpy(in, half + i, 16);
            for (int x = 0; x < 16; x += Vec::kLanes)
                (kType == DType::kBf16 ? Vec::FromBf16(in + x) : Vec::FromFp16(in + x))
                    .Store(out + x);
            std::memcpy(to + i, out, 32);
        }
    }
}

// Soft cap: cap * tanh(scale * x / cap), relative error below 5e-7 however large the cap is.
class SoftCap {
   public:
    explicit SoftCap(const AttentionParams& p)
        : scale_(Vec::Set(static_cast<float>(p.scale < 0 ? -p.scale : p.scale))),
          inner_(scale_ * Vec::Set(static_cast<float>(1 / p.soft_cap))),
          cap_(Vec::Set(static_cast<float>(p.soft_cap))) {}

    Vec operator()(Vec x) const {
        const Vec one = Vec::Set(1.0f), zero = Vec::Set(0.0f);
        const Vec t = x * inner_, square = t * t;
        // Up to 1/2: tanh(t) / t, minimax in t^2, relative error 1.5e-8. 1 - e below would cancel.
        Vec ratio = Vec::Set(0.017241491f);
        ratio = Vec::MulAdd(ratio, square, Vec::Set(-0.053045494f));
        ratio = Vec::MulAdd(ratio, square, Vec::Set(0.13325879f));
        ratio = Vec::MulAdd(ratio, square, Vec::Set(-0.33333144f));
        ratio = Vec::MulAdd(ratio, square, one);
        const uint32_t negative = Vec::LessEqual(t, zero);
        const Vec magnitude = Vec::Select(negative, zero - t, t);
        const Vec e = Exp2(magnitude * Vec::Set(-2.8853900817779268f));  // e^(-2 |t|)
        const Vec tanh = (one - e) / (one + e);
        return Vec::Select(Vec::LessEqual(square, Vec::Set(0.25f)), x * scale_ * ratio,
                           cap_ * Vec::Select(negative, zero - tanh, tanh));
    }

   private:
    Vec scale_, inner_, cap_;
};

// An fp8 number as a float; exact, and exact in bf16 and fp16 too (e5m2 is the upper half of fp16).
inline float FromFp8(uint8_t x, KvType type) {
    const auto [mantissa_bits, bias, fnuz, largest] = Fp8FormOf(type);
    const int exponent = (x & 0x7f) >> mantissa_bits, mantissa = x & ((1 << mantissa_bits) - 1);
    const bool ends_in_infinity = type == KvType::kFp8E5m2 && exponent == 31;
    float value;
    if (fnuz               ? x == 0x80
        : ends_in_infinity ? mantissa != 0
                           : mantissa_bits == 3 && (x & 0x7f) == 0x7f)
        value = __builtin_nanf("");
    else if (ends_in_infinity)
        value = __builtin_inff();
    else if (exponent == 0)
        value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
    else
        value = std::ldexp(static_cast<float>(mantissa | 1 << mantissa_bits),
                           exponent - bias - mantissa_bits);
    return x & 0x80 ? -value : value;
}

// All 256 numbers of an fp8 type as floats.
inline const float* Fp8Table(KvType type) {
    struct Tables {
        float of[kFp8Types + 1][256];  // kSame has none
        Tables() {
            for (int of_type = 1; of_type <= kFp8Types; ++of_type)
                for (int x = 0; x < 256; ++x)
                    of[of_type][x] = FromFp8(static_cast<uint8_t>(x), static_cast<KvType>(of_type));
        }
    };
    static const Tables tables;
    return tables.of[static_cast<int>(type)];
}

}  // namespace
