// The K block sequence of LiteAttention: walks the kept blocks of a skip bitmap and votes on them.
//
// A tile is one q block against one K block. It stays in the list of the next step unless every row
// of the q block says that it lies too far below what the row has seen before:
//
//   (largest score of the tile - running maximum before the tile) c <= threshold        fp32, log2
//
// c and the threshold as in attention.h and params.h. A row says so of no tile before its running
// maximum is finite (inf <= threshold and NaN <= threshold are false), of no tile of the must-do
// list, never at threshold -inf, and never again after it has met a NaN. Rows past the end of the
// sequence repeat the last row (qk.h) and so vote as it does. Method: LiteAttention,
// arXiv 2511.11062.
//
// A row of the bitmap is read word by word as the walk gets there, by scalar loads, one every 32 K
// blocks; LDS is K's and V's. In walking order words are reversed, and bits in words, if K blocks
// are walked from the last to the first, so the walk is find-first-bit either way. A wave's vote is
// one bit, kept in a scalar register for up to 32 K blocks and then OR-ed into the next step's row
// in memory: it costs the hot loop 7 vector instructions, and the workgroup no barrier.
#pragma once

#include "attention.h"

namespace liteattention::gfx942 {

// A tile's rows of the bitmaps. All scalar.
struct SkipRows {
    const uint32_t* read;
    uint32_t* write;
    const uint32_t* must_do;    // null: none
    const uint32_t* must_skip;  // null: none
    int32_t words;
    uint32_t tail;  // the bits of the last word that are K blocks
    bool descending;

    LITE_DEVICE SkipRows(const LiteParams& p, int64_t bitmap)
        : read(p.read + bitmap),
          write(p.write + bitmap),
          must_do(p.must_do),
          must_skip(p.must_skip),
          words(static_cast<int32_t>((Blocks(p) + 31u) / 32u)),
          tail(~0u >> (-Blocks(p) % 32u)),
          descending(p.descending != 0) {}

    // In 32 bits: the 64-bit quotients of geometry.h take the vector ALU.
    static LITE_DEVICE uint32_t Blocks(const LiteParams& p) {
        return (static_cast<uint32_t>(p.kv_len) + kKBlock - 1u) / kKBlock;
    }

    // Word `w` in walking order is word Place(w) in memory, with its bits in Walk order.
    LITE_DEVICE int32_t Place(int32_t w) const { return descending ? words - 1 - w : w; }
    LITE_DEVICE uint32_t Walk(uint32_t bits) const {
        return descending ? __builtin_bitreverse32(bits) : bits;
    }
    LITE_DEVICE uint32_t MustDo(int32_t place) const {
        return must_do ? ScalarWord(must_do, place) : 0u;
    }
    // (read | must_do) & ~must_skip; bits past the last K block are dropped.
    LITE_DEVICE uint32_t Kept(int32_t place) const {
        uint32_t kept = ScalarWord(read, place) | MustDo(place);
        if (must_skip) kept &= ~ScalarWord(must_skip, place);
        return place == words - 1 ? kept & tail : kept;
    }

    // The workgroup clears the row that votes are OR-ed into. WaitLoads() and a barrier must
    // follow.
    LITE_DEVICE void ClearVotes() const {
#pragma unroll 1
        for (int32_t w = static_cast<int32_t>(ThreadId()); w < words; w += kDenseThreads)
            write[w] = 0;
    }
    // From the whole wave, scalar; its first lane does it.
    LITE_DEVICE void AddVotes(int32_t w, uint32_t votes) const {
        const Word4 row = DescriptorWords(reinterpret_cast<const char*>(write + Place(w)), 4);
        OrWord(row, LaneHere() * 4, Walk(votes));
    }
};

class KeptBlocks {
   public:
    static constexpr bool kRaggedLast = false, kFewScalars = true, kLeavesOut = true;

    // `bitmap` is where the tile's rows begin, in words.
    LITE_DEVICE KeptBlocks(const LiteParams& p, int64_t bitmap)
        : bitmap_(bitmap),
          words_(static_cast<int32_t>(SkipWords(p.kv_len))),
          flip_(p.descending ? ~0u : 0u),
          threshold_(Bits(p.threshold) == kMinusInfinity ? kNever : Bits(p.threshold)),
          soft_(static_cast<uint32_t>(p.soft_skip)) {
        now_ = Find();
        next_ = Find();
    }

    LITE_DEVICE bool Has(int32_t i) const { return Entry(i) != kNone; }
    LITE_DEVICE int32_t At(int32_t i) const { return Block(Entry(i)); }

    // In kSteps steps, each of which fits beside one MFMA.
    static constexpr int kSteps = 5;
    template <int kStep>
    LITE_DEVICE void Advance() {
        if constexpr (kStep == 0) {
            if ((now_ ^ next_) & kPlace & ~31u) Flush();
        } else if constexpr (kStep == 1) {
            Record();
            now_ = next_;
        } else if constexpr (kStep == 2) {
            FindWord();
        } else if constexpr (kStep == 3) {
            next_ = Lowest();
        } else {
            if (bits_ == 0) next_ = kNone;
            bits_ &= bits_ - 1;
        }
    }

    // `top` are the maxima of the tile, `before` the statistics without it: not 0 if Decide must
    // look at the tile; if 0, the wave keeps it.
    LITE_DEVICE uint64_t Look(const float (&top)[kQTiles], const WaveStatistics& before, float c) {
        // All ones are a NaN, too: nothing is <= it.
        const uint32_t must = static_cast<uint32_t>(static_cast<int32_t>(now_) >> 31);
        const float threshold = FromBits(threshold_ | must);
        float highest = FromBits(kMinusInfinity);
        uint64_t drop = ~uint64_t{0};
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            drop &= LanesLessEqual((top[x] - before.max[x]) * c, threshold);
            highest = __builtin_fmaxf(highest, __builtin_fmaxf(before.max[x], top[x]));
        }
        keep_ = 1;
        drops_ = All(drop);
        look_ = LanesEqual(highest, FromBits(kPlusInfinity)) | drops_;
        return look_;
    }

    // 0: the wave drops the tile's contribution, too (soft_skip). No maximum rises then, since the
    // threshold is <= 0.
    LITE_DEVICE int32_t Decide(const WaveStatistics& before, const WaveScores& scores) {
        if (look_ != 0) NoteNan(before, scores);
        keep_ = drops_ == 0 || met_nan_ != 0 ? 1u : 0u;
        return (keep_ | (soft_ ^ 1u)) != 0;
    }

    // Hands the last votes over.
    LITE_DEVICE void Flush() {
        Record();
        if (unflushed_) Rows().AddVotes(static_cast<int32_t>((now_ & kPlace) / 32), unflushed_);
        unflushed_ = keep_ = 0;
    }

   private:
    // An entry is a place in walking order, with kMust if it is in the must-do list, or kNone.
    static constexpr uint32_t kMust = 1u << 31, kPlace = kMust - 1, kNone = kPlace;
    static constexpr uint32_t kPlusInfinity = 0x7f800000u;
    static constexpr uint32_t kNever = 0x7fc00000u;  // a NaN: nothing is <= it

    LITE_DEVICE uint32_t Entry(int32_t i) const { return i == 0 ? now_ : next_; }
    LITE_DEVICE int32_t Block(uint32_t entry) const {
        // Descending: words * 32 - 1 - place, as ~x is -x - 1.
        const uint32_t last = static_cast<uint32_t>(words_) * 32u & flip_;
        return static_cast<int32_t>(((entry & kPlace) ^ flip_) + last);
    }

    // Found anew once every 32 K blocks: held, they would take 10 scalar registers.
    LITE_DEVICE SkipRows Rows() const { return SkipRows(ArgumentAgain<LiteParams>(), bitmap_); }

    // Notes the vote on the current block.
    LITE_DEVICE void Record() { unflushed_ |= keep_ << (now_ & 31u); }

    // The next kept K block: its word, if there is one, and it.
    LITE_DEVICE void FindWord() {
        while (bits_ == 0 && word_ + 1 < words_) {
            ++word_;
            const SkipRows rows = Rows();
            const int32_t place = rows.Place(word_);
            bits_ = rows.Walk(rows.Kept(place));
            must_ = rows.Walk(rows.MustDo(place));
        }
    }
    LITE_DEVICE uint32_t Lowest() const {
        const uint32_t bit = static_cast<uint32_t>(__builtin_ctz(bits_));
        return static_cast<uint32_t>(word_) * 32u + bit + (must_ >> bit << 31);
    }
    LITE_DEVICE uint32_t Find() {
        FindWord();
        const uint32_t found = bits_ ? Lowest() : kNone;
        bits_ &= bits_ - 1;
        return found;
    }
    // 1 if all lanes are in it, else 0. Counted out of the compiler's sight, which would compare,
    // and make a mask of lanes of the result.
    static LITE_DEVICE uint32_t All(uint64_t lanes) {
        return static_cast<uint32_t>(ScalarHere(__builtin_popcountll(lanes))) / kWaveSize;
    }

    // Finds lanes that have met a NaN: now, or before, which shows in their sum. A maximum of +inf
    // makes the sum NaN without one (inf - inf), so once a row's maximum is +inf this must look at
    // every tile; else only at those that would be dropped.
    LITE_DEVICE void NoteNan(const WaveStatistics& before, const WaveScores& scores) {
        uint64_t lanes = 0;
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            lanes |= LanesUnordered(before.sum[x], before.sum[x]) &
                     ~LanesEqual(before.max[x], FromBits(kPlusInfinity));
#pragma unroll
            for (int t = 0; t < kKBlock / L::kTile; ++t)
#pragma unroll
                for (int i = 0; i < L::kRegisters; i += 4) {
                    const auto& tile = scores.tile[t][x];
                    lanes |= LanesUnordered(tile[i], tile[i + 1]) |
                             LanesUnordered(tile[i + 2], tile[i + 3]);
                    SchedulingFence();  // 16 masks at once would not fit in the scalar registers
                }
        }
        met_nan_ |= AnyBits(lanes);
    }

    int64_t bitmap_;
    int32_t words_;
    uint32_t flip_;       // of a place, to count from the other end
    uint32_t threshold_;  // bits
    uint32_t soft_;       // 0 or 1: a bool would be a mask of lanes

    int32_t word_ = -1;             // of bits_
    uint32_t bits_ = 0, must_ = 0;  // of that word: not yet returned by Find; must-do
    uint32_t now_, next_;           // entries
    uint32_t unflushed_ = 0;        // votes of the word of now_
    uint32_t keep_ = 0;             // the vote on now_, until it is in there
    uint32_t drops_ = 0;            // from Look to Decide: 1 if every row would drop the tile
    uint64_t look_ = 0;             // likewise: not 0 if there may be a NaN to note
    uint32_t met_nan_ = 0;          // not 0 if any lane has, in any of its rows
};

}  // namespace liteattention::gfx942
