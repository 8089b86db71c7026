// The work of a call or of a step, cut into pieces, ordered longest first and run on threads.
//
// Requests share nothing but the threads: dense attention is a batch of equal requests. A request
// of many query rows is cut into q tiles, which read keys and values that were packed for all tiles
// of a kv head; one of few rows into parts of its keys, read where they lie (decode_impl.h). Tiles
// are taken in passes, each of which packs no more than a budget.
#pragma once

#include <cstdint>
#include <vector>

#include "isa.h"
#include "kernel.h"
#include "params.h"

namespace liteattention::cpu {

// Immutable after Finish: runs may overlap.
class Schedule {
   public:
    Schedule(Isa isa, DType dtype)
        : kernel_(&SelectKernel(isa, dtype)), decode_(&SelectDecode(isa, dtype)) {}

    // Adds a request; of its tensors only pages need to be there. `share`: a short request fills
    // its tiles with several heads, which share reads of keys and values; their sums on the causal
    // edge are rounded in another order. `lite` (or null): its q blocks are the tiles and its
    // lists, which must be there, their cost.
    void AddTiles(const AttentionParams& request, bool share, const LiteParams* lite = nullptr);
    void AddDecode(const AttentionParams& request);
    // Orders what was added.
    void Finish();

    // Runs everything: requests in the order in which they were added, now with their tensors.
    // Thread safe; throws std::bad_alloc only.
    void Run(const std::vector<AttentionParams>& requests, const LiteParams* lite,
             int threads) const;

    size_t tiles() const { return tiles_; }
    size_t parts() const { return items_.size() - tiles_; }  // of decoded requests

   private:
    // Keys and values of one kv head of a request, packed for its q tiles: values, then keys.
    struct Unit {
        int32_t request;
        int32_t kv_head;
        int64_t first_block;
        int64_t blocks;
        int64_t first_key_block;  // keys of earlier blocks are read in place
        int64_t key_blocks;
    };
    struct Item {
        int32_t request;
        int32_t unit;  // -1: decoded
        int64_t head, heads;
        int64_t row_begin, row_end;
        int64_t key_begin, key_end;  // of a decoded part
        int64_t group;               // of parts to be merged, -1: nothing to merge
        int64_t part;                // its place in the group
        int64_t cost;                // in keys times lanes of a tile
    };
    // Parts of one set of lanes.
    struct Group {
        int64_t parts;
        int64_t part_words;
        int64_t offset;  // words in the buffer of parts
    };
    struct Pass {
        size_t unit_begin, unit_end;
        size_t item_begin, item_end;
        size_t packed_bytes;
        int64_t packed_blocks;
    };
    // What the threads of a run share.
    struct Shared;

    size_t UnitBytes(const Unit& unit) const {
        return static_cast<size_t>(unit.blocks) * v_bytes_ +
               static_cast<size_t>(unit.key_blocks) * k_bytes_;
    }
    int32_t AddRequest(const AttentionParams& request);
    void AddUnit(const AttentionParams& request, int64_t kv_head);
    void AddParts(Item item, int64_t begin, int64_t end, int64_t part_words);
    void EndPass();
    void Pack(const Pass& pass, const Shared& shared, int threads) const;
    void Compute(const Pass& pass, const Shared& shared, int threads) const;
    void RunTile(const Item& item, const Shared& shared, char* scratch) const;

    const Kernel* kernel_;
    const DecodeKernel* decode_;
    size_t k_bytes_ = 0, v_bytes_ = 0;  // of a packed block
    std::vector<Unit> units_;
    std::vector<Item> items_;
    std::vector<Group> groups_;
    std::vector<Pass> passes_;
    int64_t part_words_ = 0;  // of all groups
    int64_t longest_ = 0;     // keys of the longest request
    int32_t requests_ = 0;
    size_t tiles_ = 0;
    size_t packed_bytes_ = 0;  // of the pass that is being filled
};

}  // namespace liteattention::cpu
