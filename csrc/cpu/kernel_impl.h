// The attention of one q block, written once for every instruction-set path.
//
// Included by kernel_*.cpp inside a namespace of their own, after Vec (vec_*.h) and a Gemm
// (gemm_*.h): the same names must not meet across files compiled for different processors. Its
// parts: lane_math.h, packing.h, walk.h (memory and lanes of a q tile), softmax.h.
//
// Road map. A q block is cut into q tiles of Gemm::kQTile rows. A q tile walks its K blocks in
// groups of kGroup (256 keys):
//
//   scores   S^T = K Q^T            keys x rows, fp32      one product per K block
//   vote     row maxima per K block against the running maximum; bits of the next skip bitmap
//            (with a budget: each K block's share of the sums so far instead; SelectTiles at the
//            end)
//   softmax  P^T = exp2(c (S^T - M))  keys x rows          M = running maximum, exactly 1 there
//   output   O^T = O^T * 2^(M_old - M) + V^T P^T           head dim x rows, fp32
//
// Everything is transposed so that a query row is a vector lane: maxima, sums and rescaling run
// down the lanes and no step reduces across one. K is the left operand as it lies in memory (rows
// of head dim), Q is packed once per q tile and V^T once per call.
//
// Memory of one q tile of R = 128 rows at head dim 128 (all in a 2 MiB L2): S 128 KiB, P 64 KiB,
// O 64 KiB, Q 32 KiB. On AMX, half the rows would read K and V twice as often: at 8,192 keys they
// come from the L3 cache, and 64 rows were a third slower. Vector products take long enough to hide
// that: there R is 64, so that rows of S, P, O and Q follow each other without gaps in a pass of 4
// vectors of lanes, 3 to 6 % faster.

#include "softmax.h"

namespace {

template <class Gemm, DType kType>
struct KernelImpl : Softmax<Gemm, kType> {
    using Base = Softmax<Gemm, kType>;
    using Base::BlocksOf, Base::CopyRow, Base::Factor, Base::HiddenRows, Base::Keys;
    using Base::Cap, Base::MaskBlock, Base::Maxima, Base::Probabilities, Base::Rescale, Base::Shift;
    using Base::kBlockWords, Base::kEdgeRows, Base::kElement, Base::kInput, Base::kPairs;
    using Base::KeyWords, Base::LaneRow, Base::ValueRows, Base::Values;
    using typename Base::Rows, typename Base::Scratch, typename Base::Walk;

    static void Run(const QBlockTask& task, char* memory) {
        const AttentionParams& p = *task.params;
        Scratch s{};
        s.Carve(p, memory);
        const int64_t words = RoundUp(BlocksOf(p), 32) / 32;
        const int64_t count = ListKept(task, words, s.kept);
        const LiteParams* lite = task.lite;
        const bool vote = lite && lite->threshold > kLowest;
        const bool soft = vote && lite->soft_skip;
        const bool weigh = lite && lite->budget > 0;
        if (lite) std::memset(s.votes, 0, static_cast<size_t>(words) * 4);
        if (weigh) std::memset(s.mass, 0, static_cast<size_t>(BlocksOf(p)) * 4);

        // A scale of 0 makes every score 0; c = 1 then keeps the arithmetic finite.
        const float c = Factor(p);
        const int64_t tile = soft ? SoftTile(lite->vote_rows) : Gemm::kQTile;
        for (int64_t row = task.row_begin; row < task.row_end; row += tile) {
            const int64_t per_head = Min(tile, task.row_end - row);
            const int64_t rows = per_head * task.heads;
            const Walk walk{task, p,    s,    rows, RoundUp(rows, kRowStep), row, per_head,
                            c,    vote, soft, weigh};
            // The list is the whole task's: this tile sees none of the last ones.
            const int64_t seen = p.EndOf(row + per_head - 1);
            int64_t blocks = count;
            while (p.Bounded() && blocks && s.kept[blocks - 1] * int64_t{kKBlock} >= seen) --blocks;
            QTile(walk, blocks);
        }
        if (!lite) return;
        if (weigh) return Choose(task, s);
        for (int64_t w = 0; w < words; ++w) {
            const uint32_t must = lite->must_do ? lite->must_do[w] : 0;
            const uint32_t seen = KeptWord(*lite, task.read, w, BlocksOf(p));
            task.write[w] = vote ? (s.votes[w] | must) & seen : seen;
        }
    }

    // Writes the next bitmap row of a q block whose tiles were weighed, and their masses.
    static void Choose(const QBlockTask& task, const Scratch& s) {
        const int64_t blocks = BlocksOf(*task.params);
        const float rows = static_cast<float>(task.row_end - task.row_begin);
        for (int64_t j = 0; j < blocks; ++j) {
            const float mean = s.mass[j] / rows;  // of ones exactly 1; infinite: guarded
            s.mass[j] = mean > 1.0f ? 1.0f : mean;
        }
        SelectTiles(*task.lite, task.head, task.read, s.mass, blocks, s.weights, task.write);
        if (task.mass) std::memcpy(task.mass, s.mass, static_cast<size_t>(blocks) * 4);
    }

    // Writes a row's LSE and returns the factor that its sum of values is to be multiplied with.
    // `shift` is the row's maximum M as the scores are stored, `sum` that of 2^(c (score - M)).
    static float Finish(const AttentionParams& p, int64_t head, int64_t row, float shift,
                        float sum) {
        const double scale = p.soft_cap > 0 ? 1.0 : p.scale < 0 ? -p.scale : p.scale;
        const double top = static_cast<double>(shift) * scale;
        float* lse = p.lse ? p.lse + head * p.lse_head + row : nullptr;
        if (!p.sinks) {
            if (lse)
                *lse = sum == 0.0f ? kLowest
                                   : static_cast<float>(top + std::log(static_cast<double>(sum)));
            return sum == 0.0f ? 0.0f : static_cast<float>(p.v_scale) / sum;
        }
        // The sink is one more term of the sum; the larger of both maxima keeps it finite.
        const double sink = static_cast<double>(p.sinks[head]);
        const double both = sum == 0.0f || sink > top ? sink : top;
        if (both == static_cast<double>(kLowest)) {
            if (lse) *lse = kLowest;
            return 0.0f;
        }
        const double keys = sum == 0.0f ? 0.0 : std::exp(top - both);
        const double total = static_cast<double>(sum) * keys + std::exp(sink - both);
        if (lse) *lse = static_cast<float>(both + std::log(total));
        return static_cast<float>(p.v_scale * keys / total);
    }

    // Rows of a q tile under soft_skip: whole vote groups, near Gemm::kQTile.
    static int64_t SoftTile(int64_t vote_rows) {
        return Gemm::kQTile % vote_rows == 0 ? Gemm::kQTile : kMaxQTile / vote_rows * vote_rows;
    }

    // Lists the K blocks to walk, in walking order. Dense: those that a row may see.
    static int64_t ListKept(const QBlockTask& task, int64_t words, int32_t* kept) {
        const AttentionParams& p = *task.params;
        int64_t count = 0;
        if (!task.lite) {
            const int64_t offset = p.kv_len - p.q_len;
            const int64_t keys = p.Bounded() ? Min(p.kv_len, p.EndOf(task.row_end - 1)) : p.kv_len;
            const int64_t first = p.window ? task.row_begin + offset - p.window + 1 : 0;
            for (int64_t j = first > 0 ? first / kKBlock : 0; j * kKBlock < keys; ++j)
                kept[count++] = static_cast<int32_t>(j);
            return count;
        }
        for (int64_t w = 0; w < words; ++w)
            for (uint32_t bits = KeptWord(*task.lite, task.read, w, BlocksOf(p)); bits;
                 bits &= bits - 1)
                kept[count++] = static_cast<int32_t>(w * 32 + __builtin_ctz(bits));
        if (task.lite->descending) {
            for (int64_t i = 0, j = count - 1; i < j; ++i, --j) {
                const int32_t t = kept[i];
                kept[i] = kept[j];
                kept[j] = t;
            }
        }
        return count;
    }

    // Q^T of the tile, [key words][R]. The sign of the scale goes here, so that scores only ever
    // meet a positive factor; rows past the end are 0.
    static void PackQ(const Walk& walk) {
        const AttentionParams& p = walk.p;
        alignas(64) uint32_t staging[16 * kStagingWords];
        const int64_t words = RoundUp(KeyWords(p), 16);
        const int64_t kv_words = p.head_dim / Gemm::kPerWord;
        const uint32_t flip = p.scale < 0 ? (kPairs ? 0x80008000u : 0x80000000u) : 0u;
        for (int64_t slot = 0; slot < walk.stride; slot += 16) {
            std::memset(staging, 0, static_cast<size_t>(16 * words) * 4);
            for (int64_t i = 0; i < Min(16, walk.rows - slot) && p.scale != 0; ++i) {
                uint32_t* row = staging + i * words;
                CopyRow(LaneRow(walk, p.q, p.q_strides, slot + i), p.head_dim,
                        reinterpret_cast<char*>(row));
                for (int64_t w = 0; w < kv_words; ++w) row[w] ^= flip;
            }
            for (int64_t w = 0; w < words; w += 16)
                Transpose16x16(staging + w, words, walk.s.query + w * walk.stride + slot,
                               walk.stride);
        }
    }

    static void QTile(const Walk& walk, int64_t count) {
        const AttentionParams& p = walk.p;
        const Scratch& s = walk.s;
        PackQ(walk);
        for (int64_t r = 0; r < walk.stride; ++r) {
            s.running[r] = kLowest;
            s.shift[r] = 0.0f;
            s.sum[r] = 0.0f;
        }
        if (count == 0)
            std::memset(s.output, 0, static_cast<size_t>(ValueRows(p) * walk.stride) * 4);

        for (int64_t begin = 0; begin < count; begin += kGroup) {
            const int blocks = static_cast<int>(Min(kGroup, count - begin));
            const int32_t* kept = s.kept + begin;
            uint32_t dropped[kGroup];  // bit = 16-row slot whose part of the block is dropped
            for (int t = 0; t < blocks; ++t) {
                float* scores = s.scores + t * kKBlock * walk.stride;
                Scores(walk, kept[t], scores);
                if (p.soft_cap > 0) Cap(walk, scores);
                MaskBlock(walk, kept[t], scores);
                dropped[t] = Maxima(walk, kept[t], scores);
            }
            Shift(walk);
            Probabilities(walk, blocks, dropped, kept, count - begin);
            if (begin != 0) Rescale(walk);
            Output(walk, blocks, kept, begin != 0);
        }
        Store(walk);
    }

    // S^T of a K block. On the edge of what rows see it is formed in strips of 16 keys for the rows
    // that see any of them; MaskBlock hides the others. With 128 keys and rows that is 0.56 of the
    // work.
    static void Scores(const Walk& walk, int64_t block, float* scores) {
        const Rows keys = Keys(walk, block);
        const int64_t stride = walk.stride, key = block * kKBlock;
        const bool edge = HiddenRows(walk, key + kKBlock - 1) > 0;
        const int strip = edge ? 16 : kKBlock;
        for (int i = 0; i < kKBlock; i += strip) {
            const int64_t r = edge ? HiddenRows(walk, key + i) : 0;
            const char* from = keys.data + i * keys.stride;
            Gemm::Multiply(strip, static_cast<int>(stride - r), 1, &from, keys.stride,
                           static_cast<int>(KeyWords(walk.p)), walk.s.query + r, stride,
                           scores + i * stride + r, stride, false);
        }
    }

    // O^T of a group: (+)= V^T P^T. On that edge kEdgeRows at a time, with the keys they see.
    static void Output(const Walk& walk, int blocks, const int32_t* kept, bool accumulate) {
        const AttentionParams& p = walk.p;
        const Scratch& s = walk.s;
        const int64_t stride = walk.stride;
        const char* values[kGroup];
        for (int t = 0; t < blocks; ++t) values[t] = Values(walk, kept[t]);
        const auto multiply = [&](int first, int count, int words, int64_t r, int64_t rows,
                                  bool add) {
            Gemm::Multiply(static_cast<int>(ValueRows(p)), static_cast<int>(rows), count,
                           values + first, kKBlock * kElement, words,
                           s.probs + first * kBlockWords * stride + r, stride, s.output + r, stride,
                           add);
        };
        if (!HiddenRows(walk, kept[blocks - 1] * int64_t{kKBlock} + kKBlock - 1))
            return multiply(0, blocks, kBlockWords, 0, stride, accumulate);
        for (int64_t r = 0; r < stride; r += kEdgeRows) {
            const int64_t rows = Min(kEdgeRows, stride - r);
            const int64_t seen = p.EndOf(walk.first + r + rows - 1);  // keys, by its last row
            int whole = 0;
            while (whole < blocks && (kept[whole] + 1) * int64_t{kKBlock} <= seen) ++whole;
            if (whole || !accumulate) multiply(0, whole, kBlockWords, r, rows, accumulate);
            if (whole == blocks) continue;
            const int64_t rest = seen - kept[whole] * int64_t{kKBlock};
            const int64_t words = RoundUp(rest, 16 * Gemm::kPerWord) / Gemm::kPerWord;
            if (rest > 0) multiply(whole, 1, static_cast<int>(words), r, rows, true);
        }
    }

    // Rounds 16 x 16 outputs to the caller's dtype; fp32 stays where it is.
    static void Round(Rounding mode, const float* tile, uint16_t* half) {
        if constexpr (kType == DType::kFp16) {
            for (int x = 0; x < 256; x += Vec::kLanes) Vec::Load(tile + x).ToFp16(half + x);
        } else if constexpr (kType == DType::kBf16) {
            if (mode == Rounding::kRtne)
                ToBf16<Rounding::kRtne>(tile, 256, half);
            else if (mode == Rounding::kRtna)
                ToBf16<Rounding::kRtna>(tile, 256, half);
            else
                ToBf16<Rounding::kRtz>(tile, 256, half);
        }
    }

    static void Store(const Walk& walk) {
        const AttentionParams& p = walk.p;
        const Scratch& s = walk.s;
        for (int64_t r = 0; r < walk.rows; ++r) {
            const int64_t head = walk.task.head + r / walk.per_head;
            const int64_t row = walk.first + r % walk.per_head;
            s.alpha[r] = Finish(p, head, row, s.shift[r], s.sum[r]);
        }
        for (int64_t r = walk.rows; r < walk.stride; ++r) s.alpha[r] = 0.0f;
        alignas(64) float tile[16 * 16];
        alignas(64) uint16_t half[16 * 16];
        for (int64_t slot = 0; slot < walk.stride; slot += 16) {
            const int64_t valid = Min(16, walk.rows - slot);
            char* out[16];
            for (int64_t i = 0; i < valid; ++i)
                out[i] = LaneRow(walk, p.out, p.out_strides, slot + i);
            for (int64_t d = 0; d < p.value_dim; d += 16) {
                for (int64_t i = 0; i < Min(16, p.value_dim - d); ++i) {
                    float* row = s.output + (d + i) * walk.stride + slot;
                    for (int x = 0; x < 16; x += Vec::kLanes)
                        (Vec::Load(row + x) * Vec::Load(s.alpha + slot + x)).Store(row + x);
                }
                Transpose16x16(reinterpret_cast<const uint32_t*>(s.output + d * walk.stride + slot),
                               walk.stride, reinterpret_cast<uint32_t*>(tile), 16);
                Round(p.rounding, tile, half);
                const char* rounded = kType == DType::kFp32 ? reinterpret_cast<const char*>(tile)
                                                            : reinterpret_cast<const char*>(half);
                for (int64_t i = 0; i < valid; ++i) {
                    char* to = out[i] + d * kInput;
                    const char* from = rounded + i * 16 * kInput;
                    if (p.value_dim - d >= 16)
                        std::memcpy(to, from, 16 * kInput);
                    else
                        std::memcpy(to, from, 8 * kInput);
                }
            }
        }
    }
};

template <class Gemm, DType kType>
constexpr Kernel MakeKernel() {
    using K = KernelImpl<Gemm, kType>;
    return {K::KBlockBytes,  K::VBlockBytes, K::KDirect,  K::PackK,   K::PackV,
            K::ScratchBytes, K::Run,         Gemm::Enter, Gemm::Leave};
}

}  // namespace
