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
// The bitmap's rows lie in LDS in walking order: words reversed, and bits in words, if K blocks are
// walked from the last to the first. So the walk is find-first-bit either way. A wave's vote is one
// bit, kept in a scalar register for up to 32 K blocks and then OR-ed into a bitmap in LDS: it
// costs the hot loop 12 vector instructions and no LDS access, and the workgroup no barrier.
#pragma once

#include "attention.h"

namespace liteattention::gfx942 {

// LDS of one q block, in walking order. 24 KiB.
struct SkipWordsLds {
    uint32_t kept[kMaxLiteWords];   // (read | must_do) & ~must_skip
    uint32_t must[kMaxLiteWords];   // of those, the must-do list
    uint32_t votes[kMaxLiteWords];  // to be kept in the next step
};

// Word `w` of a row in walking order is word WalkWord(w) in memory, with its bits in WalkBits
// order.
LITE_DEVICE int32_t WalkWord(const LiteParams& p, int32_t words, int32_t w) {
    return p.descending ? words - 1 - w : w;
}
LITE_DEVICE uint32_t WalkBits(const LiteParams& p, uint32_t bits) {
    return p.descending ? __builtin_bitreverse32(bits) : bits;
}

// The workgroup reads the row at `bitmap` of p.read. A barrier must follow. Bits past the last K
// block are dropped.
LITE_DEVICE void LoadSkipWords(const LiteParams& p, int64_t bitmap, SkipWordsLds& lds) {
    const int32_t words = static_cast<int32_t>(SkipWords(p.kv_len));
    const uint32_t tail = ~0u >> (-static_cast<uint32_t>(KBlocks(p.kv_len)) % 32u);
#pragma unroll 1
    for (int32_t w = static_cast<int32_t>(ThreadId()); w < words; w += kDenseThreads) {
        const int32_t from = WalkWord(p, words, w);
        const uint32_t must = p.must_do ? p.must_do[from] : 0u;
        uint32_t kept = p.read[bitmap + from] | must;
        if (p.must_skip) kept &= ~p.must_skip[from];
        if (from == words - 1) kept &= tail;
        lds.kept[w] = WalkBits(p, kept);
        lds.must[w] = WalkBits(p, kept & must);
        lds.votes[w] = 0;
    }
}

// The workgroup writes the votes to the row at `bitmap` of p.write. A barrier must come before.
LITE_DEVICE void StoreVotes(const LiteParams& p, int64_t bitmap, uint32_t thread,
                            const SkipWordsLds& lds) {
    const int32_t words = static_cast<int32_t>(SkipWords(p.kv_len));
#pragma unroll 1
    for (int32_t w = static_cast<int32_t>(thread); w < words; w += kDenseThreads)
        p.write[bitmap + WalkWord(p, words, w)] = WalkBits(p, lds.votes[w]);
}

class KeptBlocks {
   public:
    static constexpr bool kRaggedLast = false, kFewScalars = true;

    // `lds` as LoadSkipWords left it, a barrier ago.
    LITE_DEVICE KeptBlocks(const LiteParams& p, SkipWordsLds& lds)
        : lds_(lds),
          words_(static_cast<int32_t>(SkipWords(p.kv_len))),
          flip_(p.descending ? ~0u : 0u),
          last_(p.descending ? static_cast<uint32_t>(words_) * 32u : 0u),
          threshold_(Bits(p.threshold) == kMinusInfinity ? kNever : Bits(p.threshold)),
          soft_(p.soft_skip != 0) {
        now_ = Find();
        next_ = Find();
        after_ = Find();
    }

    LITE_DEVICE bool Has(int32_t i) const { return Entry(i) != kNone; }
    LITE_DEVICE int32_t At(int32_t i) const { return Block(Entry(i)); }

    LITE_DEVICE int64_t Advance() {
        if ((now_ ^ next_) & kPlace & ~31u) Flush();
        const int64_t step = Block(next_) - Block(now_);
        now_ = next_;
        next_ = after_;
        after_ = Find();
        return step;
    }

    // `top` are the maxima of the tile, `before` the statistics without it. False: the wave drops
    // the tile's contribution, too (soft_skip). No maximum rises then, since the threshold is <= 0.
    LITE_DEVICE bool Vote(const float (&top)[kQTiles], const Statistics& before,
                          const Scores& scores, float c) {
        const float threshold = FromBits(now_ & kMust ? kNever : threshold_);
        uint64_t drop = ~uint64_t{0};
        float highest = FromBits(kMinusInfinity);
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            drop &= LanesLessEqual((top[x] - before.max[x]) * c, threshold);
            highest = __builtin_fmaxf(highest, __builtin_fmaxf(before.max[x], top[x]));
        }
        const bool all = drop == ~uint64_t{0};
        if (all || LanesEqual(highest, FromBits(kPlusInfinity))) NoteNan(before, scores);
        const bool keep = !all || met_nan_;
        if (keep) unflushed_ |= 1u << (now_ & 31u);
        return keep || !soft_;
    }

    // Hands the last votes over; a barrier must follow before they are read.
    LITE_DEVICE void Flush() {
        // All lanes name the same word and bits: the compiler lets one of them do it.
        if (unflushed_)
            __hip_atomic_fetch_or(&lds_.votes[(now_ & kPlace) / 32], unflushed_, __ATOMIC_RELAXED,
                                  __HIP_MEMORY_SCOPE_WORKGROUP);
        unflushed_ = 0;
    }

   private:
    // An entry is a place in walking order, with kMust if it is in the must-do list, or kNone.
    static constexpr uint32_t kMust = 1u << 31, kPlace = kMust - 1, kNone = kPlace;
    static constexpr uint32_t kPlusInfinity = 0x7f800000u;
    static constexpr uint32_t kNever = 0x7fc00000u;  // a NaN: nothing is <= it

    LITE_DEVICE uint32_t Entry(int32_t i) const { return i == 0 ? now_ : i == 1 ? next_ : after_; }
    LITE_DEVICE int32_t Block(uint32_t entry) const {
        return static_cast<int32_t>(((entry & kPlace) ^ flip_) + last_);  // ~x is -x - 1
    }

    // The next kept K block.
    LITE_DEVICE uint32_t Find() {
        while (bits_ == 0) {
            if (word_ + 1 >= words_) return kNone;
            ++word_;
            bits_ = Uniform(lds_.kept[word_]);
            must_ = Uniform(lds_.must[word_]);
        }
        const uint32_t bit = static_cast<uint32_t>(__builtin_ctz(bits_));
        bits_ &= bits_ - 1;
        return static_cast<uint32_t>(word_) * 32u + bit + (must_ >> bit << 31);
    }

    // Finds lanes that have met a NaN: now, or before, which shows in their sum. A maximum of +inf
    // makes the sum NaN without one (inf - inf), so once a row's maximum is +inf this must look at
    // every tile; else only at those that would be dropped.
    LITE_DEVICE void NoteNan(const Statistics& before, const Scores& scores) {
#pragma unroll
        for (int x = 0; x < kQTiles; ++x) {
            met_nan_ |= LanesUnordered(before.sum[x], before.sum[x]) &
                        ~LanesEqual(before.max[x], FromBits(kPlusInfinity));
#pragma unroll
            for (int t = 0; t < kKeyTiles; ++t) {
                met_nan_ |= LanesUnordered(scores.tile[t][x][0], scores.tile[t][x][1]) |
                            LanesUnordered(scores.tile[t][x][2], scores.tile[t][x][3]);
                SchedulingFence();  // 24 masks at once would not fit in the scalar registers
            }
        }
    }

    SkipWordsLds& lds_;
    int32_t words_;
    uint32_t flip_, last_;  // place to block
    uint32_t threshold_;    // bits
    bool soft_;

    int32_t word_ = -1;             // of bits_
    uint32_t bits_ = 0, must_ = 0;  // of that word: not yet returned by Find; must-do
    uint32_t now_, next_, after_;   // entries
    uint32_t unflushed_ = 0;        // votes of the word of now_
    uint64_t met_nan_ = 0;          // lanes, of any of their rows
};

}  // namespace liteattention::gfx942
