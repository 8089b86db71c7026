// What a q tile needs on its way along the K blocks: memory, lanes, and where keys and values are.

#include "packing.h"

namespace {

template <class Gemm, DType kType>
struct WalkBase : Packing<Gemm, kType> {
    using Base = Packing<Gemm, kType>;
    using Base::KBlockBytes, Base::KDirect, Base::KeyDim, Base::KeyWords, Base::KvRow, Base::Row;
    using Base::kPairs, Base::kElement, Base::kInput, Base::kBlockWords, Base::BlocksOf;
    using Base::VBlockBytes;

    // Scratch of one thread, carved from one buffer.
    struct Scratch {
        float* scores;      // [kGroup * 64][R]; fp32 kernels turn it into probabilities in place
        uint32_t* probs;    // [kGroup * 32][R] pairs of keys, or `scores`
        uint32_t* query;    // [key words][R]
        float* output;      // [value rows][R]
        float* running;     // [R] running maximum, raw scores
        float* shift;       // [R] M: the running maximum that `sum` refers to, 0 before any key
        float* alpha;       // [R] 2^(M_old - M)
        float* sum;         // [R] sum of probabilities
        int32_t* kept;      // [k_blocks] K blocks in walking order
        uint32_t* votes;    // [words] keep bits of this q block
        float* mass;        // [k_blocks] masses of its tiles; sums over rows until it is done
        uint32_t* weights;  // [k_blocks] work space of SelectTiles

        // Places the parts at `base` (may be null: nothing is placed) and returns their size.
        int64_t Carve(const AttentionParams& p, char* base) {
            const int64_t rows = kMaxQTile;
            const int64_t k_blocks = BlocksOf(p);
            int64_t used = 0;
            auto take = [&](auto** to, int64_t count) {
                using T = std::remove_reference_t<decltype(**to)>;
                if (base) *to = reinterpret_cast<T*>(base + used);
                used += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
            };
            take(&scores, kGroup * kKBlock * rows);
            take(&probs, kPairs ? kGroup * kBlockWords * rows : 0);
            if (!kPairs) probs = reinterpret_cast<uint32_t*>(scores);
            take(&query, RoundUp(KeyWords(p), 16) * rows);
            take(&output, RoundUp(p.value_dim, 16) * rows);
            take(&running, rows);
            take(&shift, rows);
            take(&alpha, rows);
            take(&sum, rows);
            take(&kept, k_blocks);
            take(&votes, RoundUp(k_blocks, 32) / 32);
            take(&mass, k_blocks);
            take(&weights, k_blocks);
            return used;
        }
    };

    static size_t ScratchBytes(const AttentionParams& p) {
        Scratch s{};
        return static_cast<size_t>(s.Carve(p, nullptr));
    }

    // What a walk needs to know beside the request.
    struct Walk {
        const QBlockTask& task;
        const AttentionParams& p;
        const Scratch& s;
        int64_t rows;      // valid rows of this q tile
        int64_t stride;    // rows rounded up to 16: the R of the layouts above
        int64_t first;     // its first row in the sequence
        int64_t per_head;  // rows of one head: lane r is row first + r % per_head of head
                           // task.head + r / per_head
        float c;           // |scale| * log2(e); with a soft cap scores are scaled: log2(e)
        bool vote;
        bool soft;
        bool weigh;
    };

    // What turns a stored score into log2 units.
    static float Factor(const AttentionParams& p) {
        const double scale = p.soft_cap > 0 ? 1.0 : p.scale < 0 ? -p.scale : p.scale;
        return scale == 0 ? 1.0f : static_cast<float>(scale * 1.4426950408889634);
    }

    // Address of a lane's row of q or out.
    static char* LaneRow(const Walk& walk, const void* base, const Strides& s, int64_t r) {
        const int64_t head = r / walk.per_head, row = r - head * walk.per_head;
        return const_cast<char*>(Row(base, s, walk.first + row, walk.task.head + head));
    }

    struct Rows {
        const char* data;
        int64_t stride;  // bytes
    };

    // K block `block`: where the caller has it, or packed.
    static Rows Keys(const Walk& walk, int64_t block) {
        const AttentionParams& p = walk.p;
        const int64_t full = KDirect(p) ? p.kv_len / kKBlock : 0;
        if (block < full) {
            const int64_t kv_head = walk.task.head / (p.q_heads / p.kv_heads);
            return {KvRow(p, p.k, p.k_strides, block * kKBlock, kv_head), p.k_strides.seq * kInput};
        }
        const int64_t first = full > walk.task.first_block ? full : walk.task.first_block;
        return {walk.task.k_packed + (block - first) * static_cast<int64_t>(KBlockBytes(p)),
                KeyDim(p) * kElement};
    }

    static const char* Values(const Walk& walk, int64_t block) {
        return walk.task.v_packed +
               (block - walk.task.first_block) * static_cast<int64_t>(VBlockBytes(walk.p));
    }

    static constexpr int64_t kEdgeRows = 32;  // of the output that are formed together on the edge

    // Rows at the top of the tile that see no key from `key` on, in multiples of kRowStep. With
    // rows of several heads the edge is not a straight one: none then.
    static int64_t HiddenRows(const Walk& walk, int64_t key) {
        const AttentionParams& p = walk.p;
        if (!p.Bounded() || walk.per_head != walk.rows) return 0;
        const int64_t hidden = key + 1 - p.EndOf(walk.first);
        return hidden <= 0 ? 0 : Min(hidden / kRowStep * kRowStep, walk.stride);
    }
};

}  // namespace
