// The K block sequence of LiteAttention: the kept blocks of a skip bitmap, one after the other.
//
// A row of the bitmap is read word by word as the walk gets there, by scalar loads, one every 32 K
// blocks; LDS is K's and V's. In walking order words are reversed, and bits in words, if K blocks
// are walked from the last to the first, so the walk is find-first-bit either way. What a step
// learns of its blocks is handed over when the walk leaves a word: skip_vote.h, weigh.h.
#pragma once

#include "attention.h"

namespace liteattention::gfx942 {

// What the order has at the workgroup's position.
template <class Params>
LITE_DEVICE uint32_t OrderWord(const Params& p) {
    return ScalarWord(reinterpret_cast<const uint32_t*>(p.order),
                      static_cast<int32_t>(WorkgroupId()));
}

// Whether there is a tile at the workgroup's position of the order.
template <class Params>
LITE_DEVICE bool HasTile(const Params& p) {
    return !p.order || static_cast<int32_t>(OrderWord(p)) >= 0;
}

// Which tile a workgroup computes, if it has one.
template <class Params>
LITE_DEVICE Tile LiteTile(const Params& p) {
    const uint32_t q_blocks = static_cast<uint32_t>(QBlocks(p.q_len));
    const uint32_t tile = p.order ? OrderWord(p)
                                  : TileOf(static_cast<Mapping>(p.mapping), WorkgroupId(),
                                           static_cast<uint32_t>(p.batch * p.q_heads), q_blocks);
    const uint32_t row = tile / q_blocks, heads = static_cast<uint32_t>(p.q_heads);
    // Divisions run on the vector ALU: back to scalars.
    Tile t;
    t.q_block = UniformInt(tile % q_blocks);
    t.q_head = UniformInt(row % heads);
    t.batch = UniformInt(row / heads);
    return t;
}

// The number of a tile: what bitmaps have a row for.
template <class Params>
LITE_DEVICE int64_t TileIndex(const Params& p, const Tile& t) {
    const int64_t row = static_cast<int64_t>(t.batch) * p.q_heads + t.q_head;
    return row * QBlocks(p.q_len) + t.q_block;
}

// A tile's row of what a step computes: (read | must_do) & ~must_skip. All scalar.
struct KeptWords {
    const uint32_t* read;
    const uint32_t* must_do;    // null: none
    const uint32_t* must_skip;  // null: none
    int32_t words;
    uint32_t tail;  // the bits of the last word that are K blocks

    // `bitmap` is where the tile's rows begin, in words.
    template <class Params>
    LITE_DEVICE KeptWords(const Params& p, int64_t bitmap)
        : read(p.read + bitmap),
          must_do(p.must_do),
          must_skip(p.must_skip),
          words(static_cast<int32_t>((Blocks(p) + 31u) / 32u)),
          tail(~0u >> (-Blocks(p) % 32u)) {}

    // In 32 bits: the 64-bit quotients of geometry.h take the vector ALU.
    template <class Params>
    static LITE_DEVICE uint32_t Blocks(const Params& p) {
        return (static_cast<uint32_t>(p.kv_len) + kKBlock - 1u) / kKBlock;
    }

    LITE_DEVICE uint32_t MustDo(int32_t place) const {
        return must_do ? ScalarWord(must_do, place) : 0u;
    }
    // The same word, where each lane has a place of its own.
    LITE_DEVICE uint32_t KeptOfLane(int32_t place) const {
        uint32_t kept = read[place];
        if (must_do) kept |= must_do[place];
        if (must_skip) kept &= ~must_skip[place];
        return place == words - 1 ? kept & tail : kept;
    }
    // Bits past the last K block are dropped.
    LITE_DEVICE uint32_t Kept(int32_t place) const {
        uint32_t kept = ScalarWord(read, place) | MustDo(place);
        if (must_skip) kept &= ~ScalarWord(must_skip, place);
        return place == words - 1 ? kept & tail : kept;
    }
};

// The same in walking order: word `w` is word Place(w) in memory, with its bits in Walk order.
struct SkipRows : KeptWords {
    bool descending;

    template <class Params>
    LITE_DEVICE SkipRows(const Params& p, int64_t bitmap)
        : KeptWords(p, bitmap), descending(p.descending != 0) {}

    LITE_DEVICE int32_t Place(int32_t w) const { return descending ? words - 1 - w : w; }
    LITE_DEVICE uint32_t Walk(uint32_t bits) const {
        return descending ? __builtin_bitreverse32(bits) : bits;
    }
};

// Of a list in walking order: places `begin` .. `end` - 1.
struct Places {
    uint32_t begin, end;
};

// The place of the block that `rank` others of the list precede: a lane counts the blocks of a
// word.
LITE_DEVICE uint32_t PlaceOf(const SkipRows& rows, uint32_t rank) {
    const int32_t lane = static_cast<int32_t>(LaneHere());
    uint32_t before = 0;
#pragma unroll 1
    for (int32_t first = 0; first < rows.words; first += kWaveSize) {
        const int32_t own = first + lane;
        const uint32_t bits = own < rows.words ? rows.Walk(rows.KeptOfLane(rows.Place(own))) : 0u;
        const auto count = static_cast<uint32_t>(__builtin_popcount(bits));
        const uint32_t end = before + SumUpTo(count);
        const uint64_t past = Lanes(end > rank);
        before = LastLane(end);
        if (past == 0) continue;
        const int32_t found = __builtin_ctzll(past);
        auto word = static_cast<uint32_t>(OfLane(static_cast<int32_t>(bits), found));
        const auto begin = static_cast<uint32_t>(OfLane(static_cast<int32_t>(end - count), found));
#pragma unroll 1
        for (uint32_t i = begin; i < rank; ++i) word &= word - 1;
        return static_cast<uint32_t>((first + found) * 32 + __builtin_ctz(word));
    }
    return static_cast<uint32_t>(rows.words) * 32u;
}

// kInParts: a workgroup may have a part of the list.
template <class Params, bool kInParts = false>
class KeptBlocks {
   public:
    static constexpr bool kRaggedLast = false, kFewScalars = true;

    LITE_DEVICE KeptBlocks(const Params& p, int64_t bitmap)
        : bitmap_(bitmap),
          words_(static_cast<int32_t>(SkipWords(p.kv_len))),
          flip_(p.descending ? ~0u : 0u) {
        now_ = Find();
        next_ = Find();
    }
    // Its first block is at `places.begin`.
    LITE_DEVICE KeptBlocks(const Params& p, int64_t bitmap, Places places)
        : bitmap_(bitmap),
          words_(static_cast<int32_t>(SkipWords(p.kv_len))),
          flip_(p.descending ? ~0u : 0u),
          end_(places.end),
          word_(static_cast<int32_t>(places.begin / 32) - 1) {
        static_assert(kInParts);
        FindWord();
        bits_ &= ~0u << places.begin % 32;
        now_ = Find();
        next_ = Find();
    }

    LITE_DEVICE bool Has(int32_t i) const { return Entry(i) != kNone; }
    LITE_DEVICE int32_t At(int32_t i) const { return Block(Entry(i)); }

    static constexpr int kSteps = 5;

   protected:
    // An entry is a place in walking order, with kMust if it is in the must-do list, or kNone.
    static constexpr uint32_t kMust = 1u << 31, kPlace = kMust - 1, kNone = kPlace;

    LITE_DEVICE uint32_t Now() const { return now_; }
    LITE_DEVICE int64_t Bitmap() const { return bitmap_; }
    // Found anew once every 32 K blocks: held, they would take 10 scalar registers.
    LITE_DEVICE SkipRows Rows() const { return SkipRows(ArgumentAgain<Params>(), bitmap_); }
    LITE_DEVICE int32_t Block(uint32_t entry) const {
        // Descending: words * 32 - 1 - place, as ~x is -x - 1.
        const uint32_t last = static_cast<uint32_t>(words_) * 32u & flip_;
        return static_cast<int32_t>(((entry & kPlace) ^ flip_) + last);
    }

    // Whether the next block is in another word, so that what is known of this word's blocks must
    // be handed over: step 0 of Advance. Walk does the others.
    LITE_DEVICE bool LeavesWord() const { return (now_ ^ next_) & kPlace & ~31u; }
    template <int kStep>
    LITE_DEVICE void Walk() {
        if constexpr (kStep == 1) {
            now_ = next_;
        } else if constexpr (kStep == 2) {
            FindWord();
        } else if constexpr (kStep == 3) {
            next_ = Lowest();
        } else if constexpr (kStep == 4) {
            if (bits_ == 0) next_ = kNone;
            bits_ &= bits_ - 1;
        }
    }

   private:
    LITE_DEVICE uint32_t Entry(int32_t i) const { return i == 0 ? now_ : next_; }

    // The next kept K block: its word, if there is one, and it.
    LITE_DEVICE void FindWord() {
        while (bits_ == 0 && HasWord()) {
            Seldom();
            ++word_;
            const SkipRows rows = Rows();
            const int32_t place = rows.Place(word_);
            bits_ = rows.Walk(rows.Kept(place));
            must_ = rows.Walk(rows.MustDo(place));
            if constexpr (kInParts) {
                const uint32_t left = end_ - static_cast<uint32_t>(word_) * 32u;
                if (left < 32) bits_ &= ~(~0u << left);
            }
        }
    }
    LITE_DEVICE bool HasWord() const {
        if constexpr (kInParts) return static_cast<uint32_t>(word_ + 1) * 32u < end_;
        return word_ + 1 < words_;
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

    int64_t bitmap_;
    int32_t words_;
    uint32_t flip_;     // of a place, to count from the other end
    uint32_t end_ = 0;  // kInParts: places from here on belong to others

    int32_t word_ = -1;             // of bits_
    uint32_t bits_ = 0, must_ = 0;  // of that word: not yet returned by Find; must-do
    uint32_t now_, next_;           // entries
};

}  // namespace liteattention::gfx942
