#include "check/global_races.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "isa/decode.h"
#include "isa/text.h"
#include "machine/wave.h"

namespace emulator {
namespace {

constexpr uint64_t kAll = ~0ull;

// Calls f(begin, end) for runs of neighbouring lanes.
template <class F>
void each_run(const uint64_t* address, uint64_t lanes, uint32_t bytes, F&& f) {
    if (lanes == kAll) {
        uint64_t gaps = 0;
        for (int lane = 1; lane < kLanes; ++lane) gaps |= address[lane] - address[lane - 1] - bytes;
        if (gaps == 0) return f(address[0], address[0] + uint64_t{64} * bytes);
    }
    uint64_t begin = 0, end = 0;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const uint64_t at = address[std::countr_zero(left)];
        if (at >= begin && at + bytes <= end) continue;  // lanes that share an address
        if (at == end && end) {
            end += bytes;
            continue;
        }
        if (end > begin) f(begin, end);
        begin = at;
        end = at + bytes;
    }
    if (end > begin) f(begin, end);
}

// Calls f(page number, first byte in the page, last byte + 1) for the pages of [begin, end).
template <class F>
void each_page(uint64_t begin, uint64_t end, F&& f) {
    while (begin < end) {
        const uint64_t stop = std::min(end, (begin / kPageBytes + 1) * kPageBytes);
        f(begin / kPageBytes, begin % kPageBytes, stop - begin / kPageBytes * kPageBytes);
        begin = stop;
    }
}

// Calls f(word, mask) for the 64-byte words of bytes [from, to) of a page.
template <class F>
void each_word(uint64_t from, uint64_t to, F&& f) {
    for (size_t word = from / 64; word * 64 < to; ++word) {
        uint64_t mask = kAll;
        if (from > word * 64) mask <<= from - word * 64;
        if (to < word * 64 + 64) mask &= kAll >> (word * 64 + 64 - to);
        f(word, mask);
    }
}

void touch(Touched& touched, uint64_t from, uint64_t to, uint32_t by) {
    each_word(from, to, [&](size_t word, uint64_t mask) {
        touched.bits[word] |= mask;
        touched.by[word] = by;
    });
}

void add(Touched& to, const Touched& from, uint32_t group) {
    for (size_t word = 0; word < kPageWords; ++word) {
        if (!from.bits[word]) continue;
        to.bits[word] |= from.bits[word];
        to.by[word] = from.by[word];
        to.group[word] = group;
    }
}

TouchedPage::Stores& stores_of(TouchedPage& page) {
    if (!page.stores) page.stores = std::make_unique<TouchedPage::Stores>();
    return *page.stores;
}

uint32_t who(const Wave& wave, const Inst& inst) { return inst.index << 5 | wave.id; }

}  // namespace

TouchedPage* TouchedPages::find(uint64_t number) const {
    const auto found = index_.find(number);
    return found == index_.end() ? nullptr : found->second;
}

TouchedPage& TouchedPages::at(uint64_t number) {
    TouchedPage*& cached = cache_[number % kCached];
    if (cached && cached->number == number) return *cached;
    TouchedPage*& page = index_[number];
    if (!page) {
        if (used_ == pages_.size()) pages_.push_back(std::make_unique<TouchedPage>());
        page = pages_[used_++].get();
        page->number = number;
    }
    return *(cached = page);
}

void TouchedPages::add(const TouchedPages& other, uint32_t group) {
    for (size_t i = 0; i < other.size(); ++i) {
        const TouchedPage& from = other[i];
        TouchedPage& to = at(from.number);
        if (from.any_read) {
            to.any_read = true;
            emulator::add(to.read, from.read, group);
        }
        if (!from.stores) continue;
        TouchedPage::Stores& stores = stores_of(to);
        emulator::add(stores.written, from.stores->written, group);
        emulator::add(stores.atomic, from.stores->atomic, group);
        for (size_t word = 0; word < kPageWords; ++word)
            for (uint64_t bits = from.stores->written.bits[word]; bits; bits &= bits - 1) {
                const size_t byte = word * 64 + static_cast<size_t>(std::countr_zero(bits));
                stores.values[byte] = from.stores->values[byte];
            }
    }
}

void TouchedPages::clear() {
    for (size_t i = 0; i < used_; ++i) {
        TouchedPage& page = *pages_[i];
        if (page.any_read) page.read.bits.fill(0);
        page.any_read = false;
        page.stores.reset();
    }
    used_ = 0;
    index_.clear();
    cache_.fill(nullptr);
}

void GlobalAccesses::begin(uint32_t workgroup) {
    for (auto& row : parts_)
        for (TouchedPages& part : row) part.clear();
    acquired_ = false;
    workgroup_ = workgroup;
}

void GlobalAccesses::release() {
    for (auto& [open, released] : parts_) {
        if (open.empty()) continue;
        if (released.empty()) {
            std::swap(open, released);
            continue;
        }
        released.add(open, workgroup_);
        open.clear();
    }
}

void GlobalAccesses::note(const Wave& wave, const Inst& inst, const uint64_t* address,
                          uint64_t lanes, uint32_t bytes, Access access, uint32_t dword) {
    const bool ordering = access == Access::atomic || inst.sc1, releases = access != Access::load;
    if (ordering) {
        if (releases) release();
        acquired_ |= access == Access::load || (access == Access::atomic && inst.dst[0].dwords);
    }
    TouchedPages& part = parts_[acquired_][ordering && releases];
    const uint32_t by = who(wave, inst);
    each_run(address, lanes, bytes, [&](uint64_t begin, uint64_t end) {
        each_page(begin, end, [&](uint64_t number, uint64_t from, uint64_t to) {
            TouchedPage& page = part.at(number);
            if (ordering) return touch(stores_of(page).atomic, from, to, by);
            if (access == Access::store) return touch(stores_of(page).written, from, to, by);
            page.any_read = true;
            if (!page.stores) return touch(page.read, from, to, by);
            // What the workgroup stored itself it finds there.
            each_word(from, to, [&](size_t word, uint64_t mask) {
                mask &= ~page.stores->written.bits[word];
                page.read.bits[word] |= mask;
                if (mask) page.read.by[word] = by;
            });
        });
    });
    if (access != Access::store || ordering) return;
    const uint32_t skip = std::strstr(inst.name, "_d16_hi") ? 2 : 0;
    for (uint64_t left = lanes; left; left &= left - 1) {
        const int lane = std::countr_zero(left);
        each_page(address[lane], address[lane] + bytes,
                  [&](uint64_t number, uint64_t from, uint64_t to) {
                      uint8_t* const values = stores_of(part.at(number)).values.data();
                      const uint64_t first = number * kPageBytes - address[lane] + skip;
                      for (uint64_t at = from; at < to; ++at) {
                          const uint64_t byte = first + at;
                          values[at] = static_cast<uint8_t>(
                              wave.v[inst.src[1].index + dword + byte / 4][lane] >> byte % 4 * 8);
                      }
                  });
    }
}

void GlobalAccesses::note_scalar(const Wave& wave, const Inst& inst, uint64_t address,
                                 uint64_t bytes) {
    each_page(address, address + bytes, [&](uint64_t number, uint64_t from, uint64_t to) {
        TouchedPage& page = parts_[acquired_][0].at(number);
        page.any_read = true;
        touch(page.read, from, to, who(wave, inst));
    });
}

void GlobalRaces::join(GlobalAccesses& accesses) {
    const std::lock_guard lock(mutex_);
    const uint32_t group = accesses.workgroup_;
    for (int acquired = 0; acquired < 2; ++acquired)
        for (int released = 0; released < 2; ++released)
            for (int before = 0; before < 2; ++before)
                for (int after = 0; after < 2; ++after) {
                    if ((acquired && after) || (released && before)) continue;  // ordered
                    compare(accesses.parts_[acquired][released], parts_[before][after], group);
                }
    for (int acquired = 0; acquired < 2; ++acquired)
        for (int released = 0; released < 2; ++released)
            parts_[acquired][released].add(accesses.parts_[acquired][released], group);
}

void GlobalRaces::compare(const TouchedPages& mine, const TouchedPages& theirs, uint32_t group) {
    if (theirs.empty()) return;
    // In address order: which byte a finding names does not depend on what was touched first.
    std::vector<std::pair<const TouchedPage*, const TouchedPage*>> shared;
    for (size_t i = 0; i < mine.size(); ++i) {
        const TouchedPage* const their = theirs.find(mine[i].number);
        if (their && (mine[i].stores || their->stores)) shared.emplace_back(&mine[i], their);
    }
    std::ranges::sort(shared, {}, [](const auto& pages) { return pages.first->number; });
    for (const auto& [my_page, their] : shared) {
        const TouchedPage& my = *my_page;
        for (size_t word = 0; word < kPageWords; ++word) {
            const auto check = [&](const Touched& a, const char* does, const Touched& b,
                                   const char* did, bool values) {
                uint64_t both = a.bits[word] & b.bits[word];
                if (values)
                    for (uint64_t left = both; left; left &= left - 1) {
                        const size_t byte = word * 64 + static_cast<size_t>(std::countr_zero(left));
                        if (my.stores->values[byte] == their->stores->values[byte])
                            both &= ~(left & -left);
                    }
                if (both)
                    report({my.number * kPageBytes + word * 64 +
                                static_cast<uint64_t>(std::countr_zero(both)),
                            group, a.by[word], does, b.group[word], b.by[word], did});
            };
            if (my.stores) {
                check(my.stores->written, "stores", their->read, "loads", false);
                check(my.stores->atomic, "changes", their->read, "loads", false);
            }
            if (!their->stores) continue;
            check(my.read, "loads", their->stores->written, "stores", false);
            check(my.read, "loads", their->stores->atomic, "changes", false);
            if (!my.stores) continue;
            check(my.stores->written, "stores", their->stores->written, "stores", true);
            check(my.stores->written, "stores", their->stores->atomic, "changes", false);
            check(my.stores->atomic, "changes", their->stores->written, "stores", false);
        }
    }
}

void GlobalRaces::report(const Conflict& found) {
    const Inst& inst = code_.insts[found.by >> 5];
    Finding finding;
    finding.kind = "global race";
    finding.offset = inst.offset;
    finding.wave = found.by & 31;
    finding.workgroup = found.group;
    if (reported_.insert(inst.offset).second) {
        const Inst& other = code_.insts[found.other_by >> 5];
        finding.detail = "workgroup " + std::to_string(found.group) + " " + found.does +
                         " global byte " + hex(found.address) + " (" + to_string(inst) +
                         "), which workgroup " + std::to_string(found.other_group) + " " +
                         found.did + " (" + to_string(other) + " at +" + hex(other.offset) +
                         "): workgroups run in any order, and no atomic orders these two";
    }
    findings_.add(std::move(finding));
}

StoredBytes GlobalRaces::stored() const {
    StoredBytes out;
    for (const auto& row : parts_)
        for (const TouchedPages& part : row)
            for (size_t i = 0; i < part.size(); ++i) {
                if (!part[i].stores) continue;
                PageBits& bits = out[part[i].number];
                for (size_t word = 0; word < kPageWords; ++word)
                    bits[word] |=
                        part[i].stores->written.bits[word] | part[i].stores->atomic.bits[word];
            }
    return out;
}

}  // namespace emulator
