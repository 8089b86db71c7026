// Decode: attention of requests with few query rows over keys in pages (params.h: RaggedParams),
// bf16 and fp16, D = 32 to 256 (geometry.h: IsRaggedDim), caches of these numbers or of fp8. The
// time goes into reading K and V, so each is read once.
//
// Road map. The query heads that share a key head, times the few query rows, are the 16 columns of
// one MFMA tile. A workgroup of 4 waves computes one part of the keys of one (request, kv head);
// its waves take blocks of 64 keys (16 from D = 192 on) in turn and never meet in the main loop:
//
//   Locate    a key per lane: page table entry -> byte offsets of its K and V row, to LDS
//   Qk        S^T = K Q^T    a lane loads 8 neighbours of a K row: two operands as they are
//   Softmax   P^T, m, l      soft cap, masks at the ends; P^T stays in registers (mfma_layout.h)
//   Pv        O^T += V^T P^T V as it lies in the cache. A lane loads the same 8 head dims of the 4
//             keys that its quad has probabilities of, 256 bytes in a row by 16 lanes, and v_perm
//             takes the transposed operands out of them: operand j of 8 has row m = head dim
//             8 m + j. So a lane ends with 32 neighbouring outputs of a query. No LDS, no pre-pass.
//             (D = 64: 4 head dims and 4 operands a lane.) Lanes past the last dims repeat those;
//             nobody stores what they compute.
//
// An fp8 cache has half the bytes; what becomes an operand is widened on its way (cache.h).
//
// Schedule of a wave. K, V and table entries of the next block are asked for as soon as the current
// block has left the registers, so 16 KiB (8 at D = 64 and 256) or more are in flight at every
// wait, twice that in between; two workgroups fit on a compute unit:
//
//   wait K[n]   Qk[n]    Locate[n + 1], ask for K[n + 1], entries of n + 2
//               Softmax[n]
//   wait V[n]   Pv[n]    ask for V[n + 1]
//
// Entries are behind K in the queue, so waiting for them costs nothing. The last block is outside
// the loop: inside it every load is unconditional and every wait exact. Keys past the end repeat
// the last key of the part and are masked: nothing is read that no row sees.
//
// At the end the waves' states meet in LDS: maxima first, then outputs in two steps (3, 2 -> 1, 0,
// then 1 -> 0), each lane reading what the same lane of another wave has. Wave 0 writes the result,
// or the part for merge_decode.
//
// Registers at D = 128: K 64, V 64, outputs 32, queries 16, scores 16. LDS: 1 KiB of offsets a
// wave, later 128 head dims of two waves' outputs. Budget: VGPR 234, LDS 16896 (8704 up to
// D = 64).

#include "cache.h"
#include "merge_state.h"
#include "mfma_layout.h"
#include "params.h"
#include "softmax.h"
#include "store.h"

namespace liteattention::gfx942 {

using L = Layout16;
inline constexpr int kTile = L::kTile;

template <class Cache, int kDim>
struct DecodeShape {
    static constexpr int kKeys = DecodeKeys(kDim), kTiles = kKeys / kTile;
    static constexpr int kSteps = kDim / (2 * L::kDepth);  // loads of 8 elements of a K row
    static constexpr int kStepWords = 2 * Cache::kBytes;
    static constexpr bool kHalfStep = kDim % (2 * L::kDepth) != 0;  // and then one of 4
    static constexpr int kRun = kDim > 64 ? 8 : 4;  // neighbouring head dims of V in a lane
    static constexpr int kRuns = (kDim + kTile * kRun - 1) / (kTile * kRun);  // kTile * kRun apart
    static constexpr int kColumns = kDim / kRun - kTile * (kRuns - 1);  // with the last of them
    static constexpr int kRunWords = kRun * Cache::kBytes / 4;
    static constexpr int kOutBytes = kRun * kWaveSize * 16;  // of a run of one wave's outputs
    static constexpr int kOffsetBytes = kKeys * 16;          // of one wave's offsets

    // First of the head dims of V that a lane loads in run `run`.
    static LITE_DEVICE int LoadedDim(int run, int lane) {
        const int column = L::Col(lane);
        const bool own = kColumns == kTile || run + 1 < kRuns || column < kColumns;
        return kTile * kRun * run + kRun * (own ? column : kColumns - 1);
    }
    // Whether the head has the dims from `dim` on; it has kRun of them or none.
    static LITE_DEVICE bool Has(int dim) { return kDim % (kTile * kRun) == 0 || dim < kDim; }
};

// Where a block's rows of K and V begin, in bytes from those of the kv head.
template <int kKeys>
struct RowOffsets {
    uint64_t k[kKeys], v[kKeys];
};

template <int kCount>
using Words = uint32_t __attribute__((ext_vector_type(kCount)));
template <int kCount>
using UnalignedWords = Words<kCount> __attribute__((aligned(4)));

template <int kCount>
LITE_DEVICE Words<kCount> LoadWords(const char* from) {
    return *reinterpret_cast<const UnalignedWords<kCount>*>(from);
}

// The keys of one (request, kv head). All scalar.
struct KeyPages {
    const char* k;
    const char* v;
    const char* table;  // the request's row
    uint32_t table_bytes, page_size;
    Divider divider;
    uint32_t k_page, k_row, v_page, v_row;  // elements
    int32_t last;                           // the last key that may be read

    // Asks for the table entry of the page of `key`; packed keys have none, and nothing is fetched.
    LITE_DEVICE uint32_t Entry(int32_t key) const {
        return LoadWord(table, table_bytes, Divide(Clamped(key), divider) * 4u);
    }
    LITE_DEVICE uint32_t Clamped(int32_t key) const {
        return static_cast<uint32_t>(key < last ? key : last);
    }
    LITE_DEVICE uint64_t Offset(int32_t key, uint32_t page, uint32_t page_stride,
                                uint32_t row_stride, uint32_t element_bytes) const {
        const uint32_t at = Clamped(key), row = at - Divide(at, divider) * page_size;
        return (static_cast<uint64_t>(page) * page_stride +
                static_cast<uint64_t>(row) * row_stride) *
               element_bytes;
    }
};

// One wave's share of a part.
template <class Number, int kDim, class Cache>
struct DecodeWave {
    using Shape = DecodeShape<Cache, kDim>;
    static constexpr int kTiles = Shape::kTiles, kSteps = Shape::kSteps, kRun = Shape::kRun,
                         kRuns = Shape::kRuns, kKeys = Shape::kKeys, kBytes = Cache::kBytes;

    const RaggedParams& p;
    ScoreFactors factors;
    KeyPages pages;
    RowOffsets<kKeys>& offsets;
    int lane;
    uint32_t across;
    int32_t lowest = 0, beyond;          // the keys that this lane's query sees
    int32_t all_lowest = 0, all_beyond;  // those that all queries see

    Half8 q[kSteps];
    Half4 q_half;
    Words<Shape::kStepWords> k[kTiles][kSteps];
    Words<Shape::kStepWords / 2> k_half[kTiles];
    Words<Shape::kRunWords> v[kTiles][4][kRuns];
    uint32_t entry;
    Float4 score[kTiles];
    Half4 probability[kTiles];
    float max = FromBits(kMinusInfinity), sum = 0.0f;
    Float4 out[kRuns][kRun]{};

    LITE_DEVICE DecodeWave(const RaggedParams& params, RowOffsets<kKeys>& lds, int lane_number)
        : p(params),
          factors(ScoreFactorsOf<Cache>(params)),
          offsets(lds),
          lane(lane_number),
          across((static_cast<uint32_t>(lane_number) ^ 32u) * 4u) {}

    // The first of a lane's 4 elements in the half step.
    static LITE_DEVICE int HalfDim(int lane) { return 2 * L::kDepth * kSteps + 4 * L::Group(lane); }

    LITE_DEVICE void AskForEntries(int32_t first) { entry = pages.Entry(first + lane % kKeys); }

    LITE_DEVICE void Locate(int32_t first) {
        const int key = lane % kKeys;
        offsets.k[key] = pages.Offset(first + key, entry, pages.k_page, pages.k_row, kBytes);
        offsets.v[key] = pages.Offset(first + key, entry, pages.v_page, pages.v_row, kBytes);
        WaveFence();
    }

    LITE_DEVICE void AskForKeys() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const char* row = pages.k + offsets.k[kTile * t + L::Col(lane)];
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
                k[t][s] = LoadWords<Shape::kStepWords>(row + L::QkDim(s, lane, 0) * kBytes);
            if constexpr (Shape::kHalfStep)
                k_half[t] = LoadWords<Shape::kStepWords / 2>(row + HalfDim(lane) * kBytes);
        }
        SchedulingFence();
    }

    LITE_DEVICE void AskForValues() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const char* row = pages.v + offsets.v[L::ScoreKey(t, lane, e)];
#pragma unroll
                for (int r = 0; r < kRuns; ++r)
                    v[t][e][r] =
                        LoadWords<Shape::kRunWords>(row + Shape::LoadedDim(r, lane) * kBytes);
            }
        SchedulingFence();
    }

    LITE_DEVICE void Qk() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            score[t] = Float4{};
            const auto operand = [](const auto& row, int i) {
                const Word2 words = {Cache::Two(row, i), Cache::Two(row, i + 1)};
                return __builtin_bit_cast(Half4, words);
            };
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                Number::Multiply(operand(k[t][s], 0), Low(q[s]), score[t]);
                Number::Multiply(operand(k[t][s], 2), High(q[s]), score[t]);
            }
            if constexpr (Shape::kHalfStep)
                Number::Multiply(operand(k_half[t], 0), q_half, score[t]);
        }
        SchedulingFence();
    }

    // To log2 units.
    LITE_DEVICE void ScaleScores() {
        if (p.cap_log2 != 0.0f) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    score[t][i] =
                        CapScore(score[t][i], factors.scale_log2, p.cap_log2, factors.cap_factor);
        } else {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) score[t] *= factors.scale_log2;
        }
    }

    LITE_DEVICE void Mask(int32_t first) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int32_t key = first + L::ScoreKey(t, lane, i);
                const bool seen = key >= lowest && key < beyond;
                score[t][i] = FromBits(seen ? Bits(score[t][i]) : kMinusInfinity);
            }
    }

    LITE_DEVICE void Softmax(int32_t first) {
        ScaleScores();
        if (first < all_lowest || first + kKeys > all_beyond) Mask(first);
        float top = max;
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) top = __builtin_fmaxf(top, score[t][i]);
        top = __builtin_fmaxf(top, Xor16(top));
        top = __builtin_fmaxf(top, FromLane(across, top));
        // No finite score yet: -inf - 0 rather than -inf + inf.
        const float shift = FromBits(Bits(top) == kMinusInfinity ? 0u : Bits(top));
        if (Any(top > max)) {
            const float shrink = Exp2(max - shift);
            sum *= shrink;
#pragma unroll
            for (int r = 0; r < kRuns; ++r)
#pragma unroll
                for (int j = 0; j < kRun; ++j) out[r][j] *= shrink;
            max = top;
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = Exp2(score[t][i] - shift);
                sum += x[i];
            }
            const Word2 packed = {Number::Probabilities(x[0], x[1]),
                                  Number::Probabilities(x[2], x[3])};
            probability[t] = __builtin_bit_cast(Half4, packed);
            Pin(probability[t]);
        }
        SchedulingFence();
    }

    LITE_DEVICE void Pv() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int r = 0; r < kRuns; ++r)
#pragma unroll
                for (int j = 0; j < kRun; ++j) {
                    const Word2 operand = {Cache::Turned(v[t][0][r], v[t][1][r], j),
                                           Cache::Turned(v[t][2][r], v[t][3][r], j)};
                    Number::Multiply(__builtin_bit_cast(Half4, operand), probability[t], out[r][j]);
                }
        SchedulingFence();
    }

    // `count` blocks, kDecodeWaves blocks apart, the first one at key `first`.
    LITE_DEVICE void Run(int32_t first, int32_t count) {
        constexpr int32_t kNext = kDecodeWaves * kKeys;
        if (count <= 0) return;
        AskForEntries(first);
        Locate(first);
        AskForKeys();
        AskForEntries(first + kNext);
        AskForValues();
        for (; count > 1; --count) {
            Qk();
            Locate(first + kNext);
            AskForKeys();
            AskForEntries(first + 2 * kNext);
            SchedulingFence();
            Softmax(first);
            Pv();
            AskForValues();
            first += kNext;
        }
        Qk();
        Softmax(first);
        Pv();
    }
};

// Outputs to and from the same lane of another wave, 16 bytes apart from lane to lane.
template <int kRun>
LITE_DEVICE void Give(const Float4 (&out)[kRun], Float4* to) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) to[j * kWaveSize] = out[j];
}
template <int kRun>
LITE_DEVICE void Take(Float4 (&out)[kRun], const Float4* from) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) out[j] += from[j * kWaveSize];
}

template <class Number, int kDim, class Cache>
LITE_DEVICE void AttentionDecode(const RaggedParams& p) {
    using Wave = DecodeWave<Number, kDim, Cache>;
    using Shape = DecodeShape<Cache, kDim>;
    constexpr int kRun = Shape::kRun, kRuns = Shape::kRuns, kKeys = Shape::kKeys;
    constexpr int kLoopBytes = kDecodeWaves * Shape::kOffsetBytes;
    constexpr int kMergeBytes = 2 * Shape::kOutBytes;
    __shared__
        __attribute__((aligned(16))) char lds[kMergeBytes > kLoopBytes ? kMergeBytes : kLoopBytes];
    __shared__ float wave_max[kDecodeWaves][kTile], wave_sum[kDecodeWaves][kTile];

    // Divisions run on the vector ALU: back to scalars.
    const uint32_t id = WorkgroupId(), kv_heads = static_cast<uint32_t>(p.kv_heads);
    const uint32_t item = id / kv_heads, requests = static_cast<uint32_t>(p.requests);
    const int32_t kv_head = UniformInt(id % kv_heads);
    const int32_t request = UniformInt(item % requests);
    const int32_t part = UniformInt(item / requests);
    const int32_t group = UniformInt(p.q_heads / p.kv_heads);

    const int32_t q_begin = p.q_start[request], q_len = p.q_start[request + 1] - q_begin;
    if (q_len <= 0 || !IsDecode(q_len, group)) return;
    const int32_t kv_begin = p.page_table ? 0 : p.kv_start[request];
    const int32_t kv_len = p.page_table ? p.kv_len[request] : p.kv_start[request + 1] - kv_begin;
    const DecodeWork work = DecodeWorkOf(q_len, kv_len, p.window, p.splits, kKeys);
    if (part >= work.parts) return;
    const int32_t begin = UniformInt(PartBegin(part, work.parts, work.blocks));
    const int32_t end = UniformInt(PartBegin(part + 1, work.parts, work.blocks));

    const uint32_t wave = Uniform(ThreadId() / kWaveSize);
    const int lane = static_cast<int>(ThreadId() % kWaveSize);
    const int32_t rows = q_len * group, column = L::Col(lane);
    const int32_t row = column < rows ? column : rows - 1;
    const int32_t query = static_cast<int32_t>(
        Divide(static_cast<uint32_t>(row), {p.group_multiplier, p.group_shift}));
    const int32_t q_head = kv_head * group + row - query * group;

    Wave w(p, *reinterpret_cast<RowOffsets<kKeys>*>(lds + wave * Shape::kOffsetBytes), lane);
    const auto first_key = [&](const void* base, const PageStrides& strides) {
        return static_cast<const char*>(base) +
               (kv_head * strides.head + kv_begin * strides.row) * Cache::kBytes;
    };
    w.pages.k = first_key(p.k, p.k_strides);
    w.pages.v = first_key(p.v, p.v_strides);
    w.pages.page_size = static_cast<uint32_t>(p.page_size);
    w.pages.divider = {p.page_multiplier, p.page_shift};
    w.pages.k_page = static_cast<uint32_t>(p.k_strides.page);
    w.pages.k_row = static_cast<uint32_t>(p.k_strides.row);
    w.pages.v_page = static_cast<uint32_t>(p.v_strides.page);
    w.pages.v_row = static_cast<uint32_t>(p.v_strides.row);
    const int32_t part_end = work.first + end * kKeys;
    w.pages.last = (part_end < kv_len ? part_end : kv_len) - 1;
    w.pages.table = reinterpret_cast<const char*>(p.page_table + request * p.page_table_stride);
    w.pages.table_bytes =
        p.page_table ? (Divide(static_cast<uint32_t>(w.pages.last), w.pages.divider) + 1) * 4u : 0u;

    const int32_t position = kv_len - q_len;            // of the first row
    const int32_t beyond = position + p.lookahead + 1;  // for the first row
    w.beyond = __builtin_elementwise_min(beyond + query, kv_len);
    w.all_beyond = __builtin_elementwise_min(beyond, kv_len);
    if (p.window > 0) {
        w.lowest = position + query - p.window + 1;
        w.all_lowest = position + q_len - p.window;
    }

    const uint16_t* q_row = p.q + (q_begin + query) * p.q_strides.row + q_head * p.q_strides.head;
#pragma unroll
    for (int s = 0; s < Shape::kSteps; ++s)
        w.q[s] = __builtin_bit_cast(
            Half8, Word4(*reinterpret_cast<const UnalignedWord4*>(q_row + L::QkDim(s, lane, 0))));

    if constexpr (Shape::kHalfStep)
        w.q_half = __builtin_bit_cast(
            Half4, LoadWords<2>(reinterpret_cast<const char*>(q_row + Wave::HalfDim(lane))));

    const int32_t own = begin + static_cast<int32_t>(wave);
    w.Run(work.first + own * kKeys, (end - own + kDecodeWaves - 1) / kDecodeWaves);

    // The waves' states become one.
    const float own_sum = TotalSum<L>(w.sum, w.across);
    if (L::Group(lane) == 0) {
        wave_max[wave][column] = w.max;
        wave_sum[wave][column] = own_sum;
    }
    Barrier();  // and no wave needs its offsets any more
    float max = FromBits(kMinusInfinity), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kDecodeWaves; ++i) max = __builtin_fmaxf(max, wave_max[i][column]);
    const float shift = FromBits(Bits(max) == kMinusInfinity ? 0u : Bits(max));
#pragma unroll
    for (int i = 0; i < kDecodeWaves; ++i)
        sum += Exp2(wave_max[i][column] - shift) * wave_sum[i][column];
    float weight = Exp2(w.max - shift);
    if constexpr (Cache::kBytes == 1) weight *= ScaleOf(p.v_scale_at, p.v_scale);
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
#pragma unroll
        for (int j = 0; j < kRun; ++j) w.out[r][j] *= weight;

    Float4* const shared = reinterpret_cast<Float4*>(lds);
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
        if (r > 0) Barrier();  // wave 0 has read what wave 3 writes next
        if (wave >= 2) Give(w.out[r], shared + (wave - 2) * kRun * kWaveSize + lane);
        Barrier();
        if (wave < 2) Take(w.out[r], shared + wave * kRun * kWaveSize + lane);
        if (wave == 1) Give(w.out[r], shared + kRun * kWaveSize + lane);  // it alone has read it
        Barrier();
        if (wave == 0) Take(w.out[r], shared + kRun * kWaveSize + lane);
    }
    if (wave != 0) return;

    if (column >= rows) return;
    // A lane's outputs: head dims kTile * kRun * r + 4 * kRun * quad + kRun * i + j.
    const int first_dim = 4 * kRun * L::Group(lane);
    if (work.parts > 1) {
        const int64_t at = (static_cast<int64_t>(request) * p.kv_heads + kv_head) * p.splits + part;
        float* part_stats = p.part_stats + at * 2 * kDecodeRows + row;
        if (L::Group(lane) == 0) {
            part_stats[0] = max;
            part_stats[kDecodeRows] = sum;
        }
        float* part_out = p.part_out + (at * kDecodeRows + row) * kDim + first_dim;
#pragma unroll
        for (int r = 0; r < kRuns; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int dim = kTile * kRun * r + kRun * i;
                if (!Shape::Has(first_dim + dim)) continue;
#pragma unroll
                for (int j = 0; j < kRun; j += 4)
                    *reinterpret_cast<Float4*>(part_out + dim + j) = Float4{
                        w.out[r][j][i], w.out[r][j + 1][i], w.out[r][j + 2][i], w.out[r][j + 3][i]};
            }
        return;
    }
    const RowResult result = Result(max, sum, p.sinks, q_head);
    uint16_t* out = p.out + (q_begin + query) * p.out_strides.row + q_head * p.out_strides.head;
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int dim = kTile * kRun * r + first_dim + kRun * i;
            if (!Shape::Has(dim)) continue;
            Words<kRun / 2> words;
#pragma unroll
            for (int j = 0; j < kRun; j += 2)
                words[j / 2] =
                    Number::Pair(w.out[r][j][i] * result.scale, w.out[r][j + 1][i] * result.scale);
            *reinterpret_cast<UnalignedWords<kRun / 2>*>(out + dim) = words;
        }
    if (p.lse && L::Group(lane) == 0) p.lse[q_head * p.lse_stride + q_begin + query] = result.lse;
}

}  // namespace liteattention::gfx942

using namespace liteattention::gfx942;

#define LITE_ATTENTION_DECODE(name, Number, kDim, Cache)        \
    LITE_KERNEL(kDecodeThreads, 2) name(const RaggedParams p) { \
        AttentionDecode<Number, kDim, Cache<Number>>(p);        \
    }
#include "variants.def"
