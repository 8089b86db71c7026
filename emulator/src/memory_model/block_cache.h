// A set-associative cache of blocks with LRU replacement.
//
// The caches of the chip hold lines of 128 bytes. Here a block, many lines that are read together,
// is the unit: a set holds `ways` blocks, and there are as many sets as fit into the capacity. A
// block's lines lie in many of the real sets, so that its home is drawn by a hash of its number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulator {

// A well-mixed 64-bit hash (the finaliser of SplitMix64, Steele et al. 2014).
inline uint64_t mixed(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

class BlockCache {
   public:
    BlockCache(uint64_t sets, uint32_t ways)
        : sets_(sets), ways_(ways), entries_(static_cast<size_t>(sets * ways)) {}

    struct Found {
        bool hit;
        double& arrival;  // when the block's data are there; a miss sets it
    };

    // Looks a block up and makes it the most recently used of its set; a miss takes the place of
    // the least recently used.
    Found access(uint64_t block) {
        const uint64_t set = (mixed(block) >> 32) * sets_ >> 32;
        Entry* const begin = &entries_[static_cast<size_t>(set * ways_)];
        const uint64_t tag = block + 1;
        uint32_t way = 0;
        while (way + 1 < ways_ && begin[way].tag != tag) ++way;
        Entry entry = begin[way];
        const bool hit = entry.tag == tag;
        if (!hit) entry = {tag, 0};
        for (; way > 0; --way) begin[way] = begin[way - 1];  // most recently used first
        begin[0] = entry;
        return {hit, begin[0].arrival};
    }

   private:
    struct Entry {
        uint64_t tag = 0;  // block + 1; 0: empty
        double arrival = 0;
    };
    uint64_t sets_;
    uint32_t ways_;
    std::vector<Entry> entries_;
};

}  // namespace emulator
