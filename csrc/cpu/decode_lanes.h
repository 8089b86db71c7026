// The products of a decode step on vector lanes: few query lanes against rows of keys and values
// that lie anywhere. Included by kernel_*.cpp after kernel_impl.h; decode_impl.h is what calls it.
//
// Scores. A dot product along the head dimension ends in a sum across a register, which for a head
// dimension of 64 costs more than the product itself. So four key rows are turned in place of it: a
// 4 x 4 transpose inside each 128-bit group makes vectors with word 4 l + c of keys 0 to 3 in group
// l, which meet a query spread the same way (SpreadQuery). Only the groups are left to be added,
// nine operations per 16 keys and lane, and the scores of 16 keys come out as one vector.
//
// Values. Lanes lie along the head dimension; a weight is broadcast. With bf16 pairs two rows are
// interleaved, for all lanes at once.
#pragma once

template <DType kRow>
inline Vec LoadVec(const char* from) {
    if constexpr (kRow == DType::kFp32) return Vec::Load(reinterpret_cast<const float*>(from));
    const uint16_t* half = reinterpret_cast<const uint16_t*>(from);
    return kRow == DType::kBf16 ? Vec::FromBf16(half) : Vec::FromFp16(half);
}

// A word is an fp32, widened from rows of any dtype.
template <DType kRow>
struct WideWords {
    static constexpr int64_t kDims = Vec::kLanes;  // of the head dimension in a vector
    static constexpr int kKeys = 1;                // in a word of the values' product
    static constexpr int64_t kBytes = kRow == DType::kFp32 ? 4 : 2;

    static Vec Mac(Vec acc, Vec a, Vec b) { return Vec::MulAdd(a, b, acc); }
    static Vec Keys(const char* row, int64_t d) { return LoadVec<kRow>(row + d * kBytes); }

    // Columns [d, d + kPanel vectors) of the key's values.
    template <int kPanel>
    static void Values(const char* const* rows, int64_t d, Vec* to) {
        for (int x = 0; x < kPanel; ++x)
            to[x] = LoadVec<kRow>(rows[0] + (d + x * Vec::kLanes) * kBytes);
    }
    static void StoreWeights(const Vec* weight, float* to) {
        weight[0].Store(to);
        weight[1].Store(to + Vec::kLanes);
    }
    // The output's columns in their order.
    static void Natural(const float* from, int64_t n, float* to) {
        std::memcpy(to, from, static_cast<size_t>(n) * 4);
    }
};

// The words that a Gemm's arithmetic takes: of rows of dtype kRow, or of copied ones (kFp32).
template <class Gemm, DType kRow>
struct DecodeWordsOf {
    using Type = WideWords<kRow>;
};
template <class Gemm, DType kRow>
using DecodeWords = typename DecodeWordsOf<Gemm, kRow>::Type;

// A query row of n words as the scores want it: every vector of words becomes four, in which word c
// of each 128-bit group fills the group.
inline void SpreadQuery(const uint32_t* row, int64_t n, uint32_t* to) {
    for (int64_t w = 0; w < n; w += Vec::kLanes, to += 4 * Vec::kLanes) {
        Vec spread[4];
        Vec::Spread(Vec::Load(reinterpret_cast<const float*>(row + w)), spread);
        for (int c = 0; c < 4; ++c) spread[c].Store(reinterpret_cast<float*>(to) + c * Vec::kLanes);
    }
}

template <class Words, int kCount, class Ask>
inline void DecodeScoresTile(const char* const* rows, const float* query, int64_t query_stride,
                             int64_t dims, float* scores, int64_t stride, Ask ask) {
    constexpr int kGroups = Vec::kLanes / 4;            // sets of 4 keys in a vector of scores
    constexpr int kAtOnce = Vec::kLanes == 16 ? 2 : 1;  // held in registers side by side
    for (int i = 0; i < kKBlock; i += Vec::kLanes) {
        Vec acc[kCount][kGroups];
        for (int y = 0; y < kCount; ++y)
            for (int g = 0; g < kGroups; ++g) acc[y][g] = Vec::Set(0.0f);
#pragma GCC unroll 4
        for (int g = 0; g < kGroups; g += kAtOnce) {
            const char* const* from = rows + i + 4 * g;
            const float* spread = query;
            for (int64_t d = 0; d < dims; d += Words::kDims, spread += 4 * Vec::kLanes) {
                ask(4 * kAtOnce);
                Vec key[kAtOnce][4];
                for (int x = 0; x < kAtOnce; ++x) {
                    for (int c = 0; c < 4; ++c) key[x][c] = Words::Keys(from[4 * x + c], d);
                    Vec::Turn(key[x]);
                }
                for (int c = 0; c < 4; ++c) {
                    for (int y = 0; y < kCount; ++y) {
                        const Vec q = Vec::Load(spread + y * query_stride + c * Vec::kLanes);
                        for (int x = 0; x < kAtOnce; ++x)
                            acc[y][g + x] = Words::Mac(acc[y][g + x], key[x][c], q);
                    }
                }
            }
        }
        for (int y = 0; y < kCount; ++y) Vec::Join(acc[y]).Store(scores + y * stride + i);
    }
}

// scores[lane][64] = rows . query[lane], each spread; ask(n) is called for every n vectors of keys.
template <class Words, class Ask>
inline void DecodeScores(const char* const* rows, const float* query, int64_t query_stride,
                         int64_t dims, int64_t lanes, float* scores, int64_t stride, Ask ask) {
    const auto no = [](int64_t) {};
    int64_t l = 0;
    const auto tile = [&](auto count) {
        const float* from = query + l * query_stride;
        float* to = scores + l * stride;
        if (l == 0)
            DecodeScoresTile<Words, count.value>(rows, from, query_stride, dims, to, stride, ask);
        else
            DecodeScoresTile<Words, count.value>(rows, from, query_stride, dims, to, stride, no);
        l += count.value;
    };
    while (l + 4 <= lanes) tile(std::integral_constant<int, 4>{});
    if (l + 2 <= lanes) tile(std::integral_constant<int, 2>{});
    if (l < lanes) tile(std::integral_constant<int, 1>{});
}

template <class Words, int kPanel, int kCount, class Ask>
inline void DecodeValuesTile(const char* const* rows, int64_t keys, const float* weights,
                             int64_t weight_stride, int64_t d, float* output, int64_t stride,
                             Ask ask) {
    Vec acc[kCount][kPanel];
    for (int y = 0; y < kCount; ++y)
        for (int x = 0; x < kPanel; ++x)
            acc[y][x] = Vec::Load(output + y * stride + x * Vec::kLanes);
    constexpr int kStep = 4 / Words::kKeys;
    for (int64_t i = 0; i < keys / Words::kKeys; i += kStep) {
        for (int k = 0; k < kStep; ++k) {
            ask(Words::kKeys);
            Vec value[kPanel];
            Words::template Values<kPanel>(rows + (i + k) * Words::kKeys, d, value);
            for (int y = 0; y < kCount; ++y) {
                const Vec weight = Vec::Set(weights[y * weight_stride + i + k]);
                for (int x = 0; x < kPanel; ++x)
                    acc[y][x] = Words::Mac(acc[y][x], value[x], weight);
            }
        }
    }
    for (int y = 0; y < kCount; ++y)
        for (int x = 0; x < kPanel; ++x) acc[y][x].Store(output + y * stride + x * Vec::kLanes);
}

template <class Words, int kPanel, class Ask>
inline void DecodeValuesPanel(const char* const* rows, int64_t keys, const float* weights,
                              int64_t weight_stride, int64_t d, int64_t lanes, float* output,
                              int64_t stride, Ask ask) {
    const auto no = [](int64_t) {};
    int64_t l = 0;
    const auto tile = [&](auto count) {
        const auto run = [&](auto call) {
            DecodeValuesTile<Words, kPanel, count.value>(rows, keys, weights + l * weight_stride,
                                                         weight_stride, d, output + l * stride,
                                                         stride, call);
        };
        if (l == 0 && d == 0)
            run(ask);
        else
            run(no);
        l += count.value;
    };
    while (l + 4 <= lanes) tile(std::integral_constant<int, 4>{});
    if (l + 2 <= lanes) tile(std::integral_constant<int, 2>{});
    if (l < lanes) tile(std::integral_constant<int, 1>{});
}

// output[lane] += sum over `keys` rows of weight times value row; dims is a multiple of
// Words::kDims. ask(n) is called for every n keys.
template <class Words, class Ask>
inline void DecodeValues(const char* const* rows, int64_t keys, const float* weights,
                         int64_t weight_stride, int64_t dims, int64_t lanes, float* output,
                         int64_t stride, Ask ask) {
    constexpr int kPanel = Vec::kLanes == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + kPanel * Vec::kLanes <= dims; d += kPanel * Vec::kLanes)
        DecodeValuesPanel<Words, kPanel>(rows, keys, weights, weight_stride, d, lanes, output + d,
                                         stride, ask);
    for (; d < dims; d += Words::kDims)
        DecodeValuesPanel<Words, Words::kDims / Vec::kLanes>(rows, keys, weights, weight_stride, d,
                                                             lanes, output + d, stride, ask);
}
