#include "machine/memory.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <map>
#include <mutex>
#include <vector>

namespace emulator {
namespace {

// One bit for each byte of a tracked range. Stores of concurrent workgroups set bits of one word.
class Written {
   public:
    explicit Written(uint64_t bytes) : words_((bytes + 63) / 64) {}

    void set(uint64_t begin, uint64_t end, bool value) {
        for (uint64_t word = begin / 64; word * 64 < end; ++word) {
            const uint64_t mask = bits(word, begin, end);
            if (mask == ~0ull)
                words_[word].store(value ? mask : 0, std::memory_order_relaxed);
            else if (value)
                words_[word].fetch_or(mask, std::memory_order_relaxed);
            else
                words_[word].fetch_and(~mask, std::memory_order_relaxed);
        }
    }

    bool all(uint64_t begin, uint64_t end) const {
        for (uint64_t word = begin / 64; word * 64 < end; ++word) {
            const uint64_t mask = bits(word, begin, end);
            if ((words_[word].load(std::memory_order_relaxed) & mask) != mask) return false;
        }
        return true;
    }

   private:
    // Bits of one word that lie in [begin, end).
    static uint64_t bits(uint64_t word, uint64_t begin, uint64_t end) {
        const uint64_t first = word * 64;
        uint64_t mask = ~0ull;
        if (begin > first) mask <<= begin - first;
        if (end < first + 64) mask &= ~0ull >> (first + 64 - end);
        return mask;
    }

    std::vector<std::atomic<uint64_t>> words_;
};

struct Range {
    uint64_t begin = 0, end = 0;
    std::shared_ptr<Written> tracked;  // null: everything counts as written
    bool constant = false;
};

// The ranges that lie in no other one, sorted: their begins and their ends both ascend, so the last
// one that begins at or before an address is the one that reaches furthest.
struct Snapshot {
    uint64_t version = 0;
    std::vector<Range> ranges;

    const Range* find(uint64_t begin, uint64_t end) const {
        auto after =
            std::upper_bound(ranges.begin(), ranges.end(), begin,
                             [](uint64_t at, const Range& range) { return at < range.begin; });
        if (after == ranges.begin()) return nullptr;
        --after;
        return end <= after->end && begin <= end ? &*after : nullptr;
    }
};

// Versions are unique in the process, so that a thread's cached snapshot tells by its version alone
// whether it is that of the table being asked.
uint64_t next_version() {
    static std::atomic<uint64_t> version{0};
    return ++version;
}

struct Cache {
    std::shared_ptr<const Snapshot> snapshot;
    uint64_t version = 0;
    const Range* last = nullptr;
};

Cache& cache() {
    thread_local Cache value;
    return value;
}

struct Extent {
    uint64_t low = std::numeric_limits<uint64_t>::max(), high = 0;
};

Extent extent_of(const uint64_t* address, uint64_t lanes) {
    Extent extent;
    if (lanes == ~0ull) {
        for (int lane = 0; lane < 64; ++lane) {
            extent.low = std::min(extent.low, address[lane]);
            extent.high = std::max(extent.high, address[lane]);
        }
        return extent;
    }
    for (uint64_t left = lanes; left; left &= left - 1) {
        const uint64_t at = address[std::countr_zero(left)];
        extent.low = std::min(extent.low, at);
        extent.high = std::max(extent.high, at);
    }
    return extent;
}

}  // namespace

struct Memory::Impl {
    mutable std::mutex mutex;
    std::multimap<uint64_t, Range> all;
    std::shared_ptr<const Snapshot> snapshot;
    std::atomic<uint64_t> version{0};

    void publish() {
        auto fresh = std::make_shared<Snapshot>();
        for (const auto& entry : all) {
            const Range& range = entry.second;
            // Same begin: keep the longer; an earlier range that reaches as far makes this one
            // redundant.
            if (!fresh->ranges.empty() && fresh->ranges.back().end >= range.end) continue;
            if (!fresh->ranges.empty() && fresh->ranges.back().begin == range.begin)
                fresh->ranges.back() = range;
            else
                fresh->ranges.push_back(range);
        }
        fresh->version = next_version();
        snapshot = fresh;
        version.store(fresh->version, std::memory_order_release);
    }

    // The range that holds [begin, end), null when none does. Valid until the thread asks again.
    const Range* find(uint64_t begin, uint64_t end) const {
        Cache& cached = cache();
        if (cached.version != version.load(std::memory_order_acquire)) {
            std::lock_guard lock(mutex);
            cached = {snapshot, snapshot->version, nullptr};
        }
        if (cached.last && begin >= cached.last->begin && end <= cached.last->end && begin <= end)
            return cached.last;
        const Range* found = cached.snapshot->find(begin, end);
        if (found) cached.last = found;
        return found;
    }
};

Memory::Memory() : impl_(std::make_unique<Impl>()) { impl_->publish(); }
Memory::~Memory() = default;

void Memory::add(uint64_t begin, uint64_t bytes, Contents contents) {
    std::lock_guard lock(impl_->mutex);
    impl_->all.emplace(begin, Range{begin, begin + bytes,
                                    contents.tracked ? std::make_shared<Written>(bytes) : nullptr,
                                    contents.constant});
    impl_->publish();
}

bool Memory::remove(uint64_t begin) {
    std::lock_guard lock(impl_->mutex);
    // Of several that begin here the latest is removed: registrations nest like a stack.
    auto [first, last] = impl_->all.equal_range(begin);
    if (first == last) return false;
    impl_->all.erase(std::prev(last));
    impl_->publish();
    return true;
}

bool Memory::remove(uint64_t begin, uint64_t bytes) {
    std::lock_guard lock(impl_->mutex);
    auto [first, last] = impl_->all.equal_range(begin);
    while (last != first) {
        --last;
        if (last->second.end - last->second.begin != bytes) continue;
        impl_->all.erase(last);
        impl_->publish();
        return true;
    }
    return false;
}

bool Memory::contains(uint64_t begin, uint64_t bytes) const {
    return impl_->find(begin, begin + bytes) != nullptr;
}

uint64_t Memory::extent(uint64_t address) const {
    const Range* range = impl_->find(address, address + 1);
    return range ? range->end - range->begin : 0;
}

void Memory::mark_written(uint64_t begin, uint64_t bytes) {
    const Range* range = impl_->find(begin, begin + bytes);
    if (range && range->tracked)
        range->tracked->set(begin - range->begin, begin + bytes - range->begin, true);
}

void Memory::mark_unwritten(uint64_t begin, uint64_t bytes) {
    const Range* range = impl_->find(begin, begin + bytes);
    if (range && range->tracked)
        range->tracked->set(begin - range->begin, begin + bytes - range->begin, false);
}

bool Memory::written(uint64_t begin, uint64_t bytes) const {
    const Range* range = impl_->find(begin, begin + bytes);
    return range && (!range->tracked ||
                     range->tracked->all(begin - range->begin, begin + bytes - range->begin));
}

uint64_t Memory::inside(const uint64_t* address, uint64_t lanes, uint32_t bytes) const {
    if (!lanes) return 0;
    const Extent extent = extent_of(address, lanes);
    if (impl_->find(extent.low, extent.high + bytes)) return lanes;
    uint64_t good = 0;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        if (impl_->find(address[lane], address[lane] + bytes)) good |= 1ull << lane;
    }
    return good;
}

uint64_t Memory::written(const uint64_t* address, uint64_t lanes, uint32_t bytes) const {
    if (!lanes) return 0;
    const Extent extent = extent_of(address, lanes);
    const Range* range = impl_->find(extent.low, extent.high + bytes);
    if (range && !range->tracked) return lanes;
    // Contiguous lanes, a wave's usual access, are one question; scattered ones are asked singly.
    if (range && extent.high + bytes - extent.low <= 64ull * bytes &&
        range->tracked->all(extent.low - range->begin, extent.high + bytes - range->begin))
        return lanes;
    uint64_t good = 0;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        if (written(address[lane], bytes)) good |= 1ull << lane;
    }
    return good;
}

uint64_t Memory::writable(const uint64_t* address, uint64_t lanes, uint32_t bytes) const {
    if (!lanes) return 0;
    const Extent extent = extent_of(address, lanes);
    const Range* range = impl_->find(extent.low, extent.high + bytes);
    if (range) return range->constant ? 0 : lanes;
    uint64_t good = 0;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        range = impl_->find(address[lane], address[lane] + bytes);
        if (range && !range->constant) good |= 1ull << lane;
    }
    return good;
}

void Memory::mark_written(const uint64_t* address, uint64_t lanes, uint32_t bytes) {
    if (!lanes) return;
    const Extent extent = extent_of(address, lanes);
    const Range* range = impl_->find(extent.low, extent.high + bytes);
    if (range && !range->tracked) return;
    // Runs of neighbouring lanes become one marking each.
    uint64_t begin = 0, end = 0;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const uint64_t at = address[std::countr_zero(left)];
        if (at == end && end != 0) {
            end += bytes;
            continue;
        }
        if (end > begin) mark_written(begin, end - begin);
        begin = at;
        end = at + bytes;
    }
    if (end > begin) mark_written(begin, end - begin);
}

}  // namespace emulator
