// Attention of few query rows over long keys, written once for every instruction-set path.
//
// Included by kernel_*.cpp after kernel_impl.h. What a decode step costs is reading keys and
// values: both are read once, where they lie, for all query heads that share them. Up to 16 lanes
// (rows times heads of one kv head) walk the keys together, four K blocks of 64 keys to a softmax
// rescale as in kernel_impl.h, with S^T [keys][16 lanes] so that a lane is a lane of the vectors.
// Two ways to form the products:
//
//   tiles  (AMX)  S^T = K Q^T and O = P V with 16 rows of K or V as one tile in place; even and
//                 odd columns of O apart until the end (see GemmAmx::Values)
//   lanes         dot products along the head dimension; O's lanes lie along it too
//
// A request is cut into parts of kDecodeSplit keys at fixed places, so that its result depends
// neither on the threads nor on the requests beside it. Parts are merged in their order.

namespace {

template <DType kType>
inline Vec LoadVec(const char* from) {
    if constexpr (kType == DType::kFp32) return Vec::Load(reinterpret_cast<const float*>(from));
    const uint16_t* half = reinterpret_cast<const uint16_t*>(from);
    return kType == DType::kBf16 ? Vec::FromBf16(half) : Vec::FromFp16(half);
}

template <class Gemm, DType kType>
struct DecodeImpl {
    using K = KernelImpl<Gemm, kType>;
    using Walk = typename K::Walk;
    static constexpr bool kTiles = Gemm::kDecodeTiles;
    static constexpr int64_t kLanes = kDecodeLanes;
    static constexpr int64_t kInput = K::kInput;

    static int64_t Dims(const AttentionParams& p) { return RoundUp(p.head_dim, 32); }
    static int64_t PartWords(const AttentionParams& p) { return 16 + Dims(p); }
    static int64_t RowBytes(const AttentionParams& p) { return Dims(p) * (kTiles ? 2 : 4); }

    struct Scratch {
        typename K::Scratch walk;
        char* keys;         // [64][Dims] keys that cannot be read in place
        char* values;       // [64, tiles: 256][Dims] values that cannot be read in place
        float* across;      // tiles: [16 lanes][256] scores, a lane's in a row
        uint32_t* weights;  // tiles: [16 of 16 keys][512], see GemmAmx::Values
        char* zero;         // a row of zeros

        int64_t Carve(const AttentionParams& p, char* base) {
            int64_t used = 0;
            auto take = [&](auto** to, int64_t count) {
                using T = std::remove_reference_t<decltype(**to)>;
                if (base) *to = reinterpret_cast<T*>(base + used);
                used += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
            };
            take(&walk.scores, kGroup * kKBlock * kLanes);
            walk.probs = reinterpret_cast<uint32_t*>(walk.scores);
            take(&walk.query, Dims(p) * kLanes);
            take(&walk.output, Dims(p) * kLanes);
            take(&walk.running, kLanes);
            take(&walk.shift, kLanes);
            take(&walk.alpha, kLanes);
            take(&walk.sum, kLanes);
            take(&keys, kKBlock * RowBytes(p));
            take(&values, (kTiles ? kGroup : 1) * kKBlock * RowBytes(p));
            take(&across, kTiles ? kLanes * kGroup * kKBlock : 0);
            take(&weights, kTiles ? kGroup * kKBlock / 16 * 512 : 0);
            take(&zero, RowBytes(p));
            return used;
        }
    };

    static size_t ScratchBytes(const AttentionParams& p) {
        Scratch s{};
        return static_cast<size_t>(s.Carve(p, nullptr));
    }

    static QBlockTask Block(const DecodeTask& task) {
        QBlockTask block{};
        block.params = task.params;
        block.head = task.head;
        block.heads = task.heads;
        block.row_begin = task.row_begin;
        block.row_end = task.row_end;
        return block;
    }

    static Walk Lanes(const QBlockTask& block, const typename K::Scratch& s) {
        const int64_t rows = block.row_end - block.row_begin;
        return {block,  *block.params,
                s,      rows * block.heads,
                kLanes, block.row_begin,
                rows,   K::Factor(*block.params),
                false,  false};
    }

    static void Run(const DecodeTask& task, char* memory) {
        const AttentionParams& p = *task.params;
        Scratch s{};
        s.Carve(p, memory);
        const QBlockTask block = Block(task);
        const Walk walk = Lanes(block, s.walk);
        std::memset(s.zero, 0, static_cast<size_t>(RowBytes(p)));
        LoadQueries(walk, s);
        for (int64_t r = 0; r < kLanes; ++r) {
            s.walk.running[r] = kLowest;
            s.walk.shift[r] = 0.0f;
            s.walk.sum[r] = 0.0f;
        }
        std::memset(s.walk.output, 0, static_cast<size_t>(kLanes * Dims(p)) * 4);
        GroupRows rows[2];
        int at = 0;
        Locate(task, s, task.key_begin, &rows[0]);
        for (int64_t key = task.key_begin; key < task.key_end; key += kGroup * kKBlock) {
            const int64_t after = key + kGroup * kKBlock;
            GroupRows& next = rows[1 - at];
            next.blocks = 0;
            if (after < task.key_end)
                Locate(task, s, after, &next);
            else if (task.next)
                Locate(*task.next, s, task.next->key_begin, &next);
            Group(walk, s, key, rows[at], next);
            at = 1 - at;
        }

        for (int64_t r = 0; r < walk.rows; ++r) {
            alignas(64) float natural[kTiles ? kMaxHeadDim : 1];
            const float* row = s.walk.output + r * Dims(p);
            if constexpr (kTiles) {
                const int64_t words = Dims(p) / 2;
                row = s.walk.output + r * words;
                Gemm::Natural(row, row + OddRow(walk) * words, words, natural);
                row = natural;
            }
            if (!task.part) {
                StoreLane(walk, r, s.walk.shift[r], s.walk.sum[r], row);
                continue;
            }
            float* part = task.part + r * PartWords(p);
            part[0] = s.walk.shift[r];
            part[1] = s.walk.sum[r];
            std::memcpy(part + 16, row, static_cast<size_t>(Dims(p)) * 4);
        }
    }

    static void Merge(const DecodeTask& task, const float* parts, int64_t count, int64_t stride,
                      char* memory) {
        const AttentionParams& p = *task.params;
        Scratch s{};
        s.Carve(p, memory);
        const QBlockTask block = Block(task);
        const Walk walk = Lanes(block, s.walk);
        for (int64_t r = 0; r < walk.rows; ++r) {
            const float* lane = parts + r * PartWords(p);
            float top = kLowest;
            for (int64_t i = 0; i < count; ++i)
                if (lane[i * stride + 1] != 0.0f && !(lane[i * stride] <= top))
                    top = lane[i * stride];
            float* row = s.walk.output;
            float sum = 0.0f;
            std::memset(row, 0, static_cast<size_t>(Dims(p)) * 4);
            for (int64_t i = 0; i < count; ++i) {
                const float* part = lane + i * stride;
                if (part[1] == 0.0f) continue;  // saw no key
                alignas(64) float weight[Vec::kLanes];
                Exp2((Vec::Set(part[0]) - Vec::Set(top)) * Vec::Set(walk.c)).Store(weight);
                sum += part[1] * weight[0];
                for (int64_t d = 0; d < Dims(p); d += Vec::kLanes)
                    Vec::MulAdd(Vec::Load(part + 16 + d), Vec::Set(weight[0]), Vec::Load(row + d))
                        .Store(row + d);
            }
            StoreLane(walk, r, sum == 0.0f ? 0.0f : top, sum, row);
        }
    }

   private:
    static void LoadQueries(const Walk& walk, const Scratch& s) {
        const AttentionParams& p = walk.p;
        if constexpr (kTiles) {
            K::PackQ(walk);
        } else {
            float* query = reinterpret_cast<float*>(s.walk.query);  // [lane][Dims]
            std::memset(query, 0, static_cast<size_t>(kLanes * Dims(p)) * 4);
            for (int64_t r = 0; r < walk.rows && p.scale != 0; ++r) {
                float* row = query + r * Dims(p);
                LoadFloats<kType>(K::LaneRow(walk, p.q, p.q_strides, r), p.head_dim, row);
                if (p.scale < 0)
                    for (int64_t d = 0; d < p.head_dim; ++d) row[d] = -row[d];
            }
            std::memset(s.walk.scores, 0, kGroup * kKBlock * kLanes * 4);
        }
    }

    // Where the keys and values of up to four K blocks lie.
    struct GroupRows {
        int blocks;
        const char* keys[kGroup * kKBlock];
        const char* values[kGroup * kKBlock];
    };

    static void Locate(const DecodeTask& task, const Scratch& s, int64_t key, GroupRows* rows) {
        const AttentionParams& p = *task.params;
        const int64_t left = task.key_end > key ? (task.key_end - key + kKBlock - 1) / kKBlock : 0;
        rows->blocks = static_cast<int>(Min(kGroup, left));
        Rows(task, s, p.k, p.k_strides, key, rows->blocks * kKBlock, rows->keys);
        Rows(task, s, p.v, p.v_strides, key, rows->blocks * kKBlock, rows->values);
    }

    // Where `count` rows of keys or values lie; rows that nobody sees are zero: past the last key,
    // and before the window, whose pages may hold anything.
    static void Rows(const DecodeTask& task, const Scratch& s, const void* base,
                     const Strides& strides, int64_t key, int64_t count, const char** rows) {
        const AttentionParams& p = *task.params;
        const int64_t n = Min(count, p.kv_len - key);
        const int64_t head = task.head / (p.q_heads / p.kv_heads);
        const int64_t step = strides.seq * K::KvBytes(p);
        for (int64_t i = 0; i < n;) {
            const char* row = K::KvRow(p, base, strides, 0, key + i, head);
            int64_t run = n - i;
            if (p.pages) run = Min(run, p.page_size - (key + i) % p.page_size);
            for (; run > 0; --run, ++i, row += step) rows[i] = row;
        }
        for (int64_t i = n < 0 ? 0 : n; i < count; ++i) rows[i] = s.zero;
        for (int64_t i = Min(count, K::FirstKey(p) - key) - 1; i >= 0; --i) rows[i] = s.zero;
    }

    // Asks for the rows of the group to come, a few per call (for every tile that is loaded), so
    // that memory works while we compute. One line in four: the L2 cache's prefetcher follows
    // ascending addresses and brings the others, while more requests of our own would hold the
    // 16 line fill buffers that the tile loads need (every line was 15 % slower from DRAM). A key
    // and its value lie side by side in the caches of frameworks, hence the order.
    struct Fetch {
        static constexpr int64_t kStep = 256;
        const GroupRows& rows;
        int64_t bytes;
        int at = 0;

        void operator()() {
            const int end =
                static_cast<int>(Min(rows.blocks * kKBlock, at + (512 + bytes - 1) / bytes));
            for (; at < end; ++at) {
                for (int64_t b = 0; b < bytes; b += kStep)
                    __builtin_prefetch(rows.keys[at] + b, 0, 2);
                for (int64_t b = 0; b < bytes; b += kStep)
                    __builtin_prefetch(rows.values[at] + b, 0, 2);
            }
        }
    };

    // Four K blocks from `key` on: scores, softmax, output. `next`: the rows needed after them.
    static void Group(const Walk& walk, const Scratch& s, int64_t key, const GroupRows& rows,
                      const GroupRows& next) {
        const AttentionParams& p = walk.p;
        const int blocks = rows.blocks;
        Fetch fetch{next, p.head_dim * K::KvBytes(p)};
        for (int t = 0; t < blocks; ++t) {
            const int64_t at = key + t * kKBlock;
            float* scores = s.walk.scores + t * kKBlock * kLanes;
            if constexpr (!kTiles) Prefetch(walk, rows.values + t * kKBlock);
            Scores(walk, s, at, rows.keys + t * kKBlock, scores, fetch);
            if (p.soft_cap > 0) K::SoftCap(walk, scores);
            K::MaskBlock(walk, at / kKBlock, scores);
        }
        if constexpr (kTiles) {
            TileMaxima(walk, s, blocks);
            K::Shift(walk);
            TileWeights(walk, s, blocks);
            TileRescale(walk, s);
            TileValues(walk, s, key, blocks, rows.values, fetch);
        } else {
            Maxima(s, blocks);
            K::Shift(walk);
            Probabilities(walk, s, blocks);
            Rescale(walk, s);
            for (int t = 0; t < blocks; ++t) Values(walk, s, t, rows.values + t * kKBlock);
        }
    }

    static void Prefetch(const Walk& walk, const char* const* rows) {
        const int64_t bytes = walk.p.head_dim * K::KvBytes(walk.p);
        for (int i = 0; i < kKBlock; ++i)
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(rows[i] + b, 0, 2);
    }

    // Up to 8 lanes keep even and odd columns of the output in the rows of one tile.
    static bool Both(const Walk& walk) { return walk.rows <= 8; }
    static int64_t OddRow(const Walk& walk) { return Both(walk) ? 8 : 16; }

    struct Tile {
        const char* data;
        int64_t stride;  // bytes
    };

    // 16 rows from key `key` on as a tile: in place if they lie evenly, else copied to `copy` and
    // padded with zeros.
    static Tile TileOf(const Walk& walk, const Scratch& s, const Strides& strides, int64_t key,
                       const char* const* rows, char* copy) {
        const AttentionParams& p = walk.p;
        const bool same = p.kv_type == KvType::kSame && K::KeyDim(p) == p.head_dim;
        const int64_t step = strides.seq * 2;
        bool even = same && key >= K::FirstKey(p) && key + 16 <= p.kv_len;
        if (even && p.pages && p.page_size % 16 != 0)
            for (int r = 1; r < 16; ++r) even = even && rows[r] == rows[0] + r * step;
        if (even) return {rows[0], step};
        const int64_t width = K::KeyDim(p) * 2;
        for (int r = 0; r < 16; ++r) {
            char* to = copy + r * width;
            if (rows[r] == s.zero) {
                std::memset(to, 0, static_cast<size_t>(width));
                continue;
            }
            K::CopyKvRow(p, rows[r], to);
            std::memset(to + p.head_dim * 2, 0, static_cast<size_t>(width - p.head_dim * 2));
        }
        return {copy, width};
    }

    // Turns the scores' lanes into rows, four at a time, and folds their maxima into the running
    // ones. The softmax then costs by the lanes that are used.
    static void TileMaxima(const Walk& walk, const Scratch& s, int blocks) {
        constexpr int64_t kRow = kGroup * kKBlock;
        for (int64_t r = 0; r < walk.rows; r += 4) {
            Vec top[4];
            for (int x = 0; x < 4; ++x) top[x] = Vec::Set(kLowest);
            for (int64_t i = 0; i < blocks * kKBlock; i += 16) {
                Vec rows[4];
                Gemm::Across(s.walk.scores + i * kLanes + r, rows);
                for (int x = 0; x < 4; ++x) {
                    rows[x].Store(s.across + (r + x) * kRow + i);
                    top[x] = Vec::Max(top[x], rows[x]);
                }
            }
            for (int x = 0; x < 4; ++x) {
                const float found = Gemm::Largest(top[x]);
                if (!(found <= s.walk.running[r + x])) s.walk.running[r + x] = found;
            }
        }
    }

    static void TileWeights(const Walk& walk, const Scratch& s, int blocks) {
        constexpr int64_t kRow = kGroup * kKBlock;
        const Vec c = Vec::Set(walk.c);
        const int64_t odd = Both(walk) ? 8 * 16 : 256;
        for (int64_t r = 0; r < walk.rows; ++r) {
            const Vec shift = Vec::Set(s.walk.shift[r]);
            Vec sum[2] = {Vec::Set(0.0f), Vec::Set(0.0f)};
            for (int64_t i = 0; i < blocks * kKBlock; i += 32) {
                for (int64_t x = 0; x < 2; ++x) {
                    const int64_t at = i + x * 16;
                    const Vec weight = Exp2((Vec::Load(s.across + r * kRow + at) - shift) * c);
                    sum[x] = sum[x] + weight;
                    uint32_t* to = s.weights + at / 16 * 512 + r * 16;
                    Gemm::Weights(weight, to, to + odd);
                }
            }
            s.walk.sum[r] = s.walk.sum[r] * s.walk.alpha[r] + (sum[0] + sum[1]).Sum();
        }
    }

    static void TileRescale(const Walk& walk, const Scratch& s) {
        const int64_t words = Dims(walk.p) / 2;
        for (int64_t r = 0; r < walk.rows; ++r) {
            const float alpha = s.walk.alpha[r];
            if (alpha == 1.0f) continue;
            for (float* row :
                 {s.walk.output + r * words, s.walk.output + (r + OddRow(walk)) * words})
                for (int64_t d = 0; d < words; d += Vec::kLanes)
                    (Vec::Load(row + d) * Vec::Set(alpha)).Store(row + d);
        }
    }

    static void TileValues(const Walk& walk, const Scratch& s, int64_t key, int blocks,
                           const char* const* rows, Fetch& fetch) {
        const AttentionParams& p = walk.p;
        constexpr int kMost = kGroup * kKBlock / 16;
        const char* tiles[kMost];
        int64_t strides[kMost];
        // Keys past the end weigh nothing.
        const int64_t left = (p.kv_len - key + 15) / 16;
        const int count = static_cast<int>(Min(blocks * kKBlock / 16, left));
        for (int i = 0; i < count; ++i) {
            const Tile tile = TileOf(walk, s, p.v_strides, key + i * 16, rows + i * 16,
                                     s.values + i * 16 * K::KeyDim(p) * 2);
            tiles[i] = tile.data;
            strides[i] = tile.stride;
        }
        Gemm::Values(Both(walk), count, s.weights, tiles, strides, Dims(p) / 2, s.walk.output,
                     fetch);
    }

    static void Scores(const Walk& walk, const Scratch& s, int64_t key, const char* const* rows,
                       float* scores, [[maybe_unused]] Fetch& fetch) {
        const AttentionParams& p = walk.p;
        if constexpr (kTiles) {
            const char* tiles[4];
            int64_t strides[4];
            for (int i = 0; i < 4; ++i) {
                const Tile tile = TileOf(walk, s, p.k_strides, key + i * 16, rows + i * 16,
                                         s.keys + i * 16 * K::KeyDim(p) * 2);
                tiles[i] = tile.data;
                strides[i] = tile.stride;
            }
            Gemm::Scores(tiles, strides, static_cast<int>(K::KeyWords(p)), s.walk.query, scores,
                         fetch);
        } else {
            const float* query = reinterpret_cast<const float*>(s.walk.query);
            const int64_t rows_used = walk.rows;
            if (InPlace(p))
                Dots<kType>(rows, query, Dims(p), p.head_dim, rows_used, scores);
            else
                Widened(p, rows, s.zero, s.keys, [&](const char* const* wide) {
                    Dots<DType::kFp32>(wide, query, Dims(p), Dims(p), rows_used, scores);
                });
        }
    }

    // Whether rows can be read a whole vector at a time as they are.
    static bool InPlace(const AttentionParams& p) {
        return p.kv_type == KvType::kSame && p.head_dim % Vec::kLanes == 0;
    }

    // Copies 64 rows to fp32 rows of Dims at `to` and calls body with them.
    template <class Body>
    static void Widened(const AttentionParams& p, const char* const* rows, const char* zero,
                        char* to, Body body) {
        const char* wide[kKBlock];
        for (int i = 0; i < kKBlock; ++i, to += RowBytes(p)) {
            std::memset(to, 0, static_cast<size_t>(RowBytes(p)));
            if (rows[i] != zero) K::CopyKvRow(p, rows[i], to);
            wide[i] = to;
        }
        body(wide);
    }

    // scores[key][lane] = rows[key] . query[lane]
    template <DType kRow>
    static void Dots(const char* const* rows, const float* query, int64_t query_stride,
                     int64_t dims, int64_t lanes, float* scores) {
        int64_t l = 0;
        for (; l + 4 <= lanes; l += 4)
            DotTile<kRow, 4>(rows, query + l * query_stride, query_stride, dims, scores + l);
        for (; l + 2 <= lanes; l += 2)
            DotTile<kRow, 2>(rows, query + l * query_stride, query_stride, dims, scores + l);
        for (; l < lanes; ++l)
            DotTile<kRow, 1>(rows, query + l * query_stride, query_stride, dims, scores + l);
    }

    template <DType kRow, int kCount>
    static void DotTile(const char* const* rows, const float* query, int64_t query_stride,
                        int64_t dims, float* scores) {
        constexpr int kKeys = Vec::kLanes == 16 ? 4 : 2;
        constexpr int64_t kBytes = kRow == DType::kFp32 ? 4 : 2;
        for (int i = 0; i < kKBlock; i += kKeys) {
            Vec acc[kKeys][kCount];
            for (int x = 0; x < kKeys; ++x)
                for (int y = 0; y < kCount; ++y) acc[x][y] = Vec::Set(0.0f);
            for (int64_t d = 0; d < dims; d += Vec::kLanes) {
                Vec key[kKeys];
                for (int x = 0; x < kKeys; ++x) key[x] = LoadVec<kRow>(rows[i + x] + d * kBytes);
                for (int y = 0; y < kCount; ++y) {
                    const Vec q = Vec::Load(query + y * query_stride + d);
                    for (int x = 0; x < kKeys; ++x) acc[x][y] = Vec::MulAdd(key[x], q, acc[x][y]);
                }
            }
            for (int x = 0; x < kKeys; ++x)
                for (int y = 0; y < kCount; ++y) scores[(i + x) * kLanes + y] = acc[x][y].Sum();
        }
    }

    static void Maxima(const Scratch& s, int blocks) {
        for (int64_t r = 0; r < kLanes; r += Vec::kLanes) {
            Vec top = Vec::Load(s.walk.running + r);
            for (int i = 0; i < blocks * kKBlock; ++i)
                top = Vec::Max(top, Vec::Load(s.walk.scores + i * kLanes + r));
            top.Store(s.walk.running + r);
        }
    }

    static void Probabilities(const Walk& walk, const Scratch& s, int blocks) {
        const Vec c = Vec::Set(walk.c);
        for (int64_t r = 0; r < kLanes; r += Vec::kLanes) {
            const Vec shift = Vec::Load(s.walk.shift + r);
            Vec sum[2] = {Vec::Set(0.0f), Vec::Set(0.0f)};
            for (int i = 0; i < blocks * kKBlock; i += 2) {
                float* at = s.walk.scores + i * kLanes + r;
                const Vec even = Exp2((Vec::Load(at) - shift) * c);
                const Vec odd = Exp2((Vec::Load(at + kLanes) - shift) * c);
                sum[0] = sum[0] + even;
                sum[1] = sum[1] + odd;
                even.Store(at);
                odd.Store(at + kLanes);
            }
            Vec::MulAdd(Vec::Load(s.walk.sum + r), Vec::Load(s.walk.alpha + r), sum[0] + sum[1])
                .Store(s.walk.sum + r);
        }
    }

    static void Rescale(const Walk& walk, const Scratch& s) {
        for (int64_t r = 0; r < walk.rows; ++r) {
            const float alpha = s.walk.alpha[r];
            if (alpha == 1.0f) continue;
            float* row = s.walk.output + r * Dims(walk.p);
            for (int64_t d = 0; d < Dims(walk.p); d += Vec::kLanes)
                (Vec::Load(row + d) * Vec::Set(alpha)).Store(row + d);
        }
    }

    // output[lane] += sum over the keys of block t of probability * value row
    static void Values(const Walk& walk, const Scratch& s, int t, const char* const* rows) {
        const AttentionParams& p = walk.p;
        const float* weights = s.walk.scores + t * kKBlock * kLanes;
        if (InPlace(p))
            Sums<kType>(rows, weights, p.head_dim, walk.rows, s.walk.output, Dims(p));
        else
            Widened(p, rows, s.zero, s.values, [&](const char* const* wide) {
                Sums<DType::kFp32>(wide, weights, Dims(p), walk.rows, s.walk.output, Dims(p));
            });
    }

    template <DType kRow>
    static void Sums(const char* const* rows, const float* weights, int64_t dims, int64_t lanes,
                     float* output, int64_t stride) {
        constexpr int kPanel = Vec::kLanes == 16 ? 4 : 2;
        int64_t d = 0;
        for (; d + kPanel * Vec::kLanes <= dims; d += kPanel * Vec::kLanes)
            SumPanel<kRow, kPanel>(rows, weights, d, lanes, output + d, stride);
        for (; d < dims; d += Vec::kLanes)
            SumPanel<kRow, 1>(rows, weights, d, lanes, output + d, stride);
    }

    template <DType kRow, int kPanel>
    static void SumPanel(const char* const* rows, const float* weights, int64_t d, int64_t lanes,
                         float* output, int64_t stride) {
        int64_t l = 0;
        for (; l + 4 <= lanes; l += 4)
            SumTile<kRow, kPanel, 4>(rows, weights + l, d, output + l * stride, stride);
        for (; l + 2 <= lanes; l += 2)
            SumTile<kRow, kPanel, 2>(rows, weights + l, d, output + l * stride, stride);
        for (; l < lanes; ++l)
            SumTile<kRow, kPanel, 1>(rows, weights + l, d, output + l * stride, stride);
    }

    template <DType kRow, int kPanel, int kCount>
    static void SumTile(const char* const* rows, const float* weights, int64_t d, float* output,
                        int64_t stride) {
        constexpr int64_t kBytes = kRow == DType::kFp32 ? 4 : 2;
        Vec acc[kCount][kPanel];
        for (int y = 0; y < kCount; ++y)
            for (int x = 0; x < kPanel; ++x)
                acc[y][x] = Vec::Load(output + y * stride + x * Vec::kLanes);
        for (int i = 0; i < kKBlock; ++i) {
            Vec value[kPanel];
            for (int x = 0; x < kPanel; ++x)
                value[x] = LoadVec<kRow>(rows[i] + (d + x * Vec::kLanes) * kBytes);
            for (int y = 0; y < kCount; ++y) {
                const Vec weight = Vec::Set(weights[i * kLanes + y]);
                for (int x = 0; x < kPanel; ++x)
                    acc[y][x] = Vec::MulAdd(value[x], weight, acc[y][x]);
            }
        }
        for (int y = 0; y < kCount; ++y)
            for (int x = 0; x < kPanel; ++x) acc[y][x].Store(output + y * stride + x * Vec::kLanes);
    }

    static void StoreLane(const Walk& walk, int64_t r, float shift, float sum, const float* row) {
        const AttentionParams& p = walk.p;
        const int64_t head = walk.task.head + r / walk.per_head;
        const float factor = K::Finish(p, 0, head, walk.first + r % walk.per_head, shift, sum);
        alignas(64) float result[kMaxHeadDim];
        alignas(64) uint16_t half[kMaxHeadDim];
        const Vec by = Vec::Set(factor);
        for (int64_t d = 0; d < Dims(p); d += Vec::kLanes)
            (Vec::Load(row + d) * by).Store(result + d);
        char* to = K::LaneRow(walk, p.out, p.out_strides, r);
        const int n = static_cast<int>(p.head_dim);
        if constexpr (kType == DType::kFp32) {
            std::memcpy(to, result, static_cast<size_t>(n) * 4);
            return;
        } else if constexpr (kType == DType::kFp16) {
            for (int64_t d = 0; d < Dims(p); d += Vec::kLanes)
                Vec::Load(result + d).ToFp16(half + d);
        } else if (p.rounding == Rounding::kRtne) {
            ToBf16<Rounding::kRtne>(result, n, half);
        } else if (p.rounding == Rounding::kRtna) {
            ToBf16<Rounding::kRtna>(result, n, half);
        } else {
            ToBf16<Rounding::kRtz>(result, n, half);
        }
        std::memcpy(to, half, static_cast<size_t>(n) * 2);
    }
};

template <class Gemm, DType kType>
constexpr DecodeKernel MakeDecode() {
    using D = DecodeImpl<Gemm, kType>;
    return {D::ScratchBytes, D::PartWords, D::Run, D::Merge};
}

}  // namespace
