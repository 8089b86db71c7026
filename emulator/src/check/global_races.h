// Data races between the workgroups of one launch, in global memory.
//
// Workgroups run in any order, so that what one stores no other may load or store without
// synchronisation, however they happened to run here. Bytes count; stores of the same value do not
// conflict. Atomics and accesses of device scope (sc1) conflict only with plain accesses, and they
// order: what a workgroup did before its last atomic or sc1 store is taken as ordered before what
// another does after its first returning atomic or sc1 load, wherever these point. So a kernel that
// synchronises through memory is never accused, and some of its races are missed.
//
// A workgroup notes what it touches, one bit per byte; when it ends, its bits meet those of the
// workgroups that ended before it. That needs no lock and no shared table while it runs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "check/findings.h"
#include "isa/inst.h"

namespace emulator {

struct Code;
struct Wave;
enum class Access : uint8_t { load, store, atomic };

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr size_t kPageWords = kPageBytes / 64;

// One bit per byte of a page.
using PageBits = std::array<uint64_t, kPageWords>;

// Which of a page's bytes were stored to, by page number.
using StoredBytes = std::unordered_map<uint64_t, PageBits>;

// Of each 64 bytes, who touched them last.
struct Touched {
    PageBits bits{};
    std::array<uint32_t, kPageWords> by{};     // instruction << 5 | wave
    std::array<uint32_t, kPageWords> group{};  // its workgroup; set when that ends
};

struct TouchedPage {
    uint64_t number = 0;
    bool any_read = false;
    Touched read;
    struct Stores {
        Touched written, atomic;
        std::array<uint8_t, kPageBytes> values{};  // of plain stores
    };
    std::unique_ptr<Stores> stores;  // null: none yet
};

// Pages by number. `clear` keeps their memory for the next workgroup.
class TouchedPages {
   public:
    TouchedPage& at(uint64_t number);
    TouchedPage* find(uint64_t number) const;
    // Adds what `group` has touched; its values and names win.
    void add(const TouchedPages& other, uint32_t group);
    void clear();
    bool empty() const { return used_ == 0; }
    const TouchedPage& operator[](size_t i) const { return *pages_[i]; }
    size_t size() const { return used_; }

   private:
    static constexpr size_t kCached = 256;
    std::vector<std::unique_ptr<TouchedPage>> pages_;
    size_t used_ = 0;
    std::unordered_map<uint64_t, TouchedPage*> index_;
    std::array<TouchedPage*, kCached> cache_{};
};

// What one workgroup touched, apart by whether an acquire came before and a release comes after.
// Owner: the thread that runs it, which uses it for all its workgroups.
class GlobalAccesses {
   public:
    void begin(uint32_t workgroup);
    // `bytes` at address[l] of each lane l of `lanes`; `dword` is the first data register of them.
    void note(const Wave& wave, const Inst& inst, const uint64_t* address, uint64_t lanes,
              uint32_t bytes, Access access, uint32_t dword);
    void note_scalar(const Wave& wave, const Inst& inst, uint64_t address, uint64_t bytes);

   private:
    friend class GlobalRaces;
    void release();
    TouchedPages parts_[2][2];  // [acquired before][released after]
    bool acquired_ = false;
    uint32_t workgroup_ = 0;
};

// Key: one launch; owner: the launch; thread-safe.
class GlobalRaces {
   public:
    GlobalRaces(const Code& code, Findings& findings) : code_(code), findings_(findings) {}
    // A workgroup has ended.
    void join(GlobalAccesses& accesses);
    StoredBytes stored() const;

   private:
    struct Conflict {
        uint64_t address;
        uint32_t group, by;
        const char* does;
        uint32_t other_group, other_by;
        const char* did;
    };
    void compare(const TouchedPages& mine, const TouchedPages& theirs, uint32_t group);
    void report(const Conflict& found);

    const Code& code_;
    Findings& findings_;
    std::mutex mutex_;
    TouchedPages parts_[2][2];
    std::set<uint32_t> reported_;  // instructions
};

}  // namespace emulator
