// Attention of few query rows over long keys, written once for every instruction-set path.
//
// Included by kernel_*.cpp after kernel_impl.h and decode_lanes.h. What a decode step costs is
// reading keys and values: both are read once, where they lie, for all query heads that share them.
// Up to 16 lanes (rows times heads of one kv head) walk the keys together, four K blocks of 64 keys
// to a softmax rescale as in kernel_impl.h. Scores are S [lane][256 keys]: keys are the lanes of
// the vectors, so that the softmax costs by the lanes that are used. Two ways to form the products:
//
//   tiles  (AMX)  S^T = K Q^T and O = P V with 16 rows of K or V as one tile in place; S^T is
//   turned
//                 afterwards; even and odd columns of O apart until the end (see GemmAmx::Values)
//   lanes         see decode_lanes.h
//
// A request is cut into parts of kDecodeSplit keys at fixed places, so that its result depends
// neither on the threads nor on the requests beside it. Parts are merged in their order.

namespace {

template <class Gemm, DType kType>
struct DecodeImpl {
    using K = KernelImpl<Gemm, kType>;
    using Walk = typename K::Walk;
    static constexpr bool kTiles = Gemm::kDecodeTiles;
    static constexpr int64_t kLanes = kDecodeLanes;
    static constexpr int64_t kRow = kGroup * kKBlock;  // scores of a lane
    // How rows are read where they lie, and when they had to be copied.
    using Words = DecodeWords<Gemm, kType>;
    using Copied = DecodeWords<Gemm, DType::kFp32>;

    static int64_t Dims(const AttentionParams& p) { return RoundUp(p.head_dim, 32); }
    static int64_t PartWords(const AttentionParams& p) { return 16 + Dims(p); }
    static int64_t RowBytes(const AttentionParams& p) { return Dims(p) * K::kElement; }

    struct Scratch {
        typename K::Scratch walk;
        char* keys;         // [64][Dims] keys that cannot be read in place
        char* values;       // [64, tiles: 256][Dims] values that cannot be read in place
        float* across;      // [16 lanes][256] scores; lanes: weights in their place
        uint32_t* weights;  // tiles: [16 of 16 keys][512], see GemmAmx::Values
        char* zero;         // a row of zeros

        int64_t Carve(const AttentionParams& p, char* base) {
            int64_t used = 0;
            auto take = [&](auto** to, int64_t count) {
                using T = std::remove_reference_t<decltype(**to)>;
                if (base) *to = reinterpret_cast<T*>(base + used);
                used += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
            };
            take(&walk.scores, kTiles ? kRow * kLanes : 0);
            walk.probs = reinterpret_cast<uint32_t*>(walk.scores);
            take(&walk.query, Dims(p) * kLanes * (kTiles ? 1 : 4));
            take(&walk.output, Dims(p) * kLanes);
            take(&walk.running, kLanes);
            take(&walk.shift, kLanes);
            take(&walk.alpha, kLanes);
            take(&walk.sum, kLanes);
            take(&keys, kKBlock * RowBytes(p));
            take(&values, kRow * RowBytes(p));
            take(&across, kLanes * kRow);
            take(&weights, kTiles ? kRow / 16 * 512 : 0);
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
        return {block,  *block.params,   s,    rows * block.heads,
                kLanes, block.row_begin, rows, K::Factor(*block.params),
                false,  false,           false};
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
        const int64_t used = kTiles ? kLanes : walk.rows;
        std::memset(s.walk.output, 0, static_cast<size_t>(used * Dims(p)) * 4);
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
            alignas(64) float row[kMaxHeadDim];
            if constexpr (kTiles) {
                const int64_t words = Dims(p) / 2;
                const float* even = s.walk.output + r * words;
                Gemm::Natural(even, even + OddRow(walk) * words, words, row);
            } else {
                Words::Natural(s.walk.output + r * Dims(p), Dims(p), row);
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
        if constexpr (kTiles) {
            K::PackQ(walk);
        } else {
            const AttentionParams& p = walk.p;
            const int64_t words = Dims(p) / Gemm::kPerWord;
            const uint32_t flip = p.scale < 0 ? (K::kPairs ? 0x80008000u : 0x80000000u) : 0u;
            alignas(64) uint32_t row[kMaxHeadDim];
            for (int64_t r = 0; r < walk.rows; ++r) {
                std::memset(row, 0, static_cast<size_t>(words) * 4);
                if (p.scale != 0)
                    K::CopyRow(K::LaneRow(walk, p.q, p.q_strides, r), p.head_dim,
                               reinterpret_cast<char*>(row));
                for (int64_t w = 0; w < p.head_dim / Gemm::kPerWord; ++w) row[w] ^= flip;
                SpreadQuery(row, words, s.walk.query + r * 4 * words);
            }
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
            const char* row = K::KvRow(p, base, strides, key + i, head);
            int64_t run = n - i;
            if (p.pages) run = Min(run, p.page_size - (key + i) % p.page_size);
            for (; run > 0; --run, ++i, row += step) rows[i] = row;
        }
        for (int64_t i = n < 0 ? 0 : n; i < count; ++i) rows[i] = s.zero;
        for (int64_t i = Min(count, K::FirstKey(p) - key) - 1; i >= 0; --i) rows[i] = s.zero;
    }

    // Asks for the rows of the group to come, a little at a time, so that memory works while we
    // compute. A key and its value lie side by side in the caches of frameworks, hence the order.
    struct Fetch {
        const GroupRows& rows;
        int64_t bytes;
        int at = 0;        // tiles: the row; lanes: twice that, and one more for its value
        int64_t line = 0;  // lanes: bytes of that row that were asked for

        // For every tile that is loaded: one line in four of some rows. Intel's L2 prefetcher
        // follows ascending addresses and brings the others, while more requests of our own would
        // hold the 16 line fill buffers that tile loads need (15 % slower from DRAM).
        void operator()() {
            constexpr int64_t kStep = 256;
            const int64_t count = (512 + bytes - 1) / bytes;
            const int end = static_cast<int>(Min(rows.blocks * kKBlock, at + count));
            for (; at < end; ++at) {
                for (int64_t b = 0; b < bytes; b += kStep)
                    __builtin_prefetch(rows.keys[at] + b, 0, 2);
                for (int64_t b = 0; b < bytes; b += kStep)
                    __builtin_prefetch(rows.values[at] + b, 0, 2);
            }
        }

        // The next `count` lines. On Zen 4 every line has to be asked for (one in four: 1.6 of the
        // time from DRAM), and few at once.
        void Lines(int64_t count) {
            for (; count > 0 && at < 2 * rows.blocks * kKBlock; --count) {
                const char* row = (at & 1 ? rows.values : rows.keys)[at >> 1];
                __builtin_prefetch(row + line, 0, 2);
                line += 64;
                if (line < bytes) continue;
                line = 0;
                ++at;
            }
        }
    };

    // Four K blocks from `key` on: scores, softmax, output. `next`: the rows needed after them.
    static void Group(const Walk& walk, const Scratch& s, int64_t key, const GroupRows& rows,
                      const GroupRows& next) {
        const AttentionParams& p = walk.p;
        const int blocks = rows.blocks;
        const int64_t count = blocks * kKBlock;
        Fetch fetch{next, p.head_dim * K::KvBytes(p)};
        for (int t = 0; t < blocks; ++t)
            Scores(walk, s, key + t * kKBlock, t, rows.keys + t * kKBlock, fetch);
        if constexpr (kTiles) Turn(walk, s, count);
        if (p.soft_cap > 0) Cap(walk, s, count);
        Mask(walk, s, key, count);
        Maxima(walk, s, count);
        K::Shift(walk);
        Weights(walk, s, count);
        Rescale(walk, s);
        if constexpr (kTiles)
            TileValues(walk, s, key, blocks, rows.values, fetch);
        else
            Values(walk, s, count, rows.values, fetch);
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
            K::CopyKvRow(p, rows[r], p.head_dim, to);
            std::memset(to + p.head_dim * 2, 0, static_cast<size_t>(width - p.head_dim * 2));
        }
        return {copy, width};
    }

    // Turns the lanes of the tiles' scores into rows, four at a time.
    static void Turn(const Walk& walk, const Scratch& s, int64_t count) {
        for (int64_t r = 0; r < walk.rows; r += 4) {
            for (int64_t i = 0; i < count; i += 16) {
                Vec rows[4];
                Gemm::Across(s.walk.scores + i * kLanes + r, rows);
                for (int x = 0; x < 4; ++x) rows[x].Store(s.across + (r + x) * kRow + i);
            }
        }
    }

    // Turns raw scores into capped, scaled ones.
    static void Cap(const Walk& walk, const Scratch& s, int64_t count) {
        const SoftCap cap(walk.p);
        for (int64_t r = 0; r < walk.rows; ++r)
            for (float* at = s.across + r * kRow; at < s.across + r * kRow + count;
                 at += Vec::kLanes)
                cap(Vec::Load(at)).Store(at);
    }

    // Hides keys that do not exist or that a lane may not see.
    static void Mask(const Walk& walk, const Scratch& s, int64_t key, int64_t count) {
        const AttentionParams& p = walk.p;
        const int64_t end = Min(count, p.kv_len - key);
        const int64_t first = walk.first + p.kv_len - p.q_len - key;  // where the first row stands
        const bool above = p.Bounded() && key + count > p.EndOf(walk.first);
        const bool below = p.window && first + walk.per_head - 1 >= p.window;
        if (end == count && !above && !below) return;
        for (int64_t r = 0; r < walk.rows; ++r) {
            float* row = s.across + r * kRow;
            const int64_t at = first + r % walk.per_head;
            const int64_t begin = p.window ? Min(count, at - p.window + 1) : 0;
            const int64_t seen = p.Bounded() ? Min(end, at + p.lookahead + 1) : end;
            for (int64_t i = 0; i < begin; ++i) row[i] = kLowest;
            for (int64_t i = seen < 0 ? 0 : seen; i < count; ++i) row[i] = kLowest;
        }
    }

    static void Maxima(const Walk& walk, const Scratch& s, int64_t count) {
        for (int64_t r = 0; r < walk.rows; ++r) {
            const float* row = s.across + r * kRow;
            Vec top[2] = {Vec::Set(kLowest), Vec::Set(kLowest)};
            for (int64_t i = 0; i < count; i += 2 * Vec::kLanes) {
                top[0] = Vec::Max(top[0], Vec::Load(row + i));
                top[1] = Vec::Max(top[1], Vec::Load(row + i + Vec::kLanes));
            }
            const float found = Vec::Max(top[0], top[1]).Largest();
            if (!(found <= s.walk.running[r])) s.walk.running[r] = found;
        }
    }

    // Turns scores into weights: in place, or as the tiles' words.
    static void Weights(const Walk& walk, const Scratch& s, int64_t count) {
        const Vec c = Vec::Set(walk.c);
        const int64_t odd = Both(walk) ? 8 * 16 : 256;
        for (int64_t r = 0; r < walk.rows; ++r) {
            const Vec shift = Vec::Set(s.walk.shift[r]);
            float* row = s.across + r * kRow;
            Vec sum[2] = {Vec::Set(0.0f), Vec::Set(0.0f)};
            for (int64_t i = 0; i < count; i += 2 * Vec::kLanes) {
                Vec weight[2];
                for (int x = 0; x < 2; ++x) {
                    weight[x] = Exp2((Vec::Load(row + i + x * Vec::kLanes) - shift) * c);
                    sum[x] = sum[x] + weight[x];
                    if constexpr (kTiles) {
                        uint32_t* to = s.weights + (i / 16 + x) * 512 + r * 16;
                        Gemm::Weights(weight[x], to, to + odd);
                    }
                }
                if constexpr (!kTiles) Words::StoreWeights(weight, row + i / Words::kKeys);
            }
            s.walk.sum[r] = s.walk.sum[r] * s.walk.alpha[r] + (sum[0] + sum[1]).Sum();
        }
    }

    static void Rescale(const Walk& walk, const Scratch& s) {
        const int64_t words = kTiles ? Dims(walk.p) / 2 : Dims(walk.p);
        for (int64_t r = 0; r < walk.rows; ++r) {
            const float alpha = s.walk.alpha[r];
            if (alpha == 1.0f) continue;
            for (int64_t half = 0; half < (kTiles ? 2 : 1); ++half) {
                float* row = s.walk.output + (r + half * OddRow(walk)) * words;
                for (int64_t d = 0; d < words; d += Vec::kLanes)
                    (Vec::Load(row + d) * Vec::Set(alpha)).Store(row + d);
            }
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

    // Scores of K block `block` of the group.
    static void Scores(const Walk& walk, const Scratch& s, [[maybe_unused]] int64_t key, int block,
                       const char* const* rows, Fetch& fetch) {
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
            Gemm::Scores(tiles, strides, static_cast<int>(K::KeyWords(p)), s.walk.query,
                         s.walk.scores + block * kKBlock * kLanes, fetch);
        } else {
            const float* query = reinterpret_cast<const float*>(s.walk.query);
            const int64_t stride = 4 * Dims(p) / Gemm::kPerWord;
            float* scores = s.across + block * kKBlock;
            const auto ask = [&](int64_t keys) { fetch.Lines(keys); };
            if (InPlace(p)) {
                DecodeScores<Words>(rows, query, stride, p.head_dim, walk.rows, scores, kRow, ask);
                return;
            }
            const char* copied[kKBlock];
            Copy(walk, s, rows, kKBlock, s.keys, copied);
            DecodeScores<Copied>(copied, query, stride, Dims(p), walk.rows, scores, kRow, ask);
        }
    }

    // Whether rows can be read a whole vector at a time as they are.
    static bool InPlace(const AttentionParams& p) {
        return p.kv_type == KvType::kSame && p.head_dim % Words::kDims == 0;
    }

    // Copies rows to rows of Dims elements at `to`, in the arithmetic's own type.
    static void Copy(const Walk& walk, const Scratch& s, const char* const* rows, int64_t count,
                     char* to, const char** copied) {
        const AttentionParams& p = walk.p;
        for (int64_t i = 0; i < count; ++i, to += RowBytes(p)) {
            std::memset(to, 0, static_cast<size_t>(RowBytes(p)));
            if (rows[i] != s.zero) K::CopyKvRow(p, rows[i], p.head_dim, to);
            copied[i] = to;
        }
    }

    // output[lane] += weights of the group's keys times their value rows
    static void Values(const Walk& walk, const Scratch& s, int64_t count, const char* const* rows,
                       Fetch& fetch) {
        const AttentionParams& p = walk.p;
        const int64_t each = (fetch.bytes + 63) / 64;
        const auto ask = [&](int64_t keys) { fetch.Lines(keys * each); };
        if (InPlace(p)) {
            DecodeValues<Words>(rows, count, s.across, kRow, p.head_dim, walk.rows, s.walk.output,
                                Dims(p), ask);
            return;
        }
        const char* copied[kRow];
        Copy(walk, s, rows, count, s.values, copied);
        DecodeValues<Copied>(copied, count, s.across, kRow, Dims(p), walk.rows, s.walk.output,
                             Dims(p), ask);
    }

    static void StoreLane(const Walk& walk, int64_t r, float shift, float sum, const float* row) {
        const AttentionParams& p = walk.p;
        const int64_t head = walk.task.head + r / walk.per_head;
        const float factor = K::Finish(p, head, walk.first + r % walk.per_head, shift, sum);
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
