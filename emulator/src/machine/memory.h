// The emulated device's memory: host memory in ranges that were allocated or registered.
//
// Device pointers are host pointers. An access outside every range is a finding and has no effect.
#pragma once

#include <cstdint>
#include <memory>

namespace emulator {

// What is known of a range: whether it remembers which bytes were written (a fresh allocation; else
// all count as written), and whether kernels may only read it (code, constants, arguments).
struct Contents {
    bool tracked = false, constant = false;
};

// Key: the device; owner: the process-wide device object; thread-safe. Ranges may nest and overlap
// (registered views of one tensor); they are counted and removed one by one.
class Memory {
   public:
    Memory();
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    void add(uint64_t begin, uint64_t bytes, Contents contents);
    // False when no such range begins there.
    bool remove(uint64_t begin);
    // The same for a range of that size.
    bool remove(uint64_t begin, uint64_t bytes);
    // True when [begin, begin + bytes) lies inside one range.
    bool contains(uint64_t begin, uint64_t bytes) const;
    // Bytes of the largest range that begins at or contains `address`, 0 when there is none.
    uint64_t extent(uint64_t address) const;
    // Written-ness, for tracked ranges: set by stores and copies, asked by loads.
    void mark_written(uint64_t begin, uint64_t bytes);
    void mark_unwritten(uint64_t begin, uint64_t bytes);
    bool written(uint64_t begin, uint64_t bytes) const;

    // The same for one instruction: `bytes` at address[l] of each lane l of `lanes`. Contiguous
    // lanes cost one look-up. Returns the lanes that lie inside a range / whose bytes were all
    // written.
    uint64_t inside(const uint64_t* address, uint64_t lanes, uint32_t bytes) const;
    uint64_t written(const uint64_t* address, uint64_t lanes, uint32_t bytes) const;
    // Of lanes that lie inside: those whose bytes kernels may write.
    uint64_t writable(const uint64_t* address, uint64_t lanes, uint32_t bytes) const;
    void mark_written(const uint64_t* address, uint64_t lanes, uint32_t bytes);

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace emulator
