#include "launch/kernarg.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "machine/wave.h"

namespace emulator {
namespace {

template <typename T>
void put(std::vector<uint8_t>& bytes, const Argument& argument, T value) {
    const size_t size = std::min<size_t>(sizeof value, argument.size);
    if (argument.offset + size <= bytes.size())
        std::memcpy(bytes.data() + argument.offset, &value, size);
}

}  // namespace

std::vector<uint8_t> kernarg_segment(const Launch& launch, uint64_t queue) {
    std::vector<uint8_t> bytes((std::max(launch.kernel->kernarg_bytes, 1u) + 15ull) / 16 * 16, 0);
    std::copy_n(launch.arguments.begin(), std::min(bytes.size(), launch.arguments.size()),
                bytes.begin());
    const uint32_t dimensions = launch.grid[2] * launch.block[2] > 1   ? 3
                                : launch.grid[1] * launch.block[1] > 1 ? 2
                                                                       : 1;
    for (const Argument& argument : launch.kernel->arguments) {
        const std::string& kind = argument.kind;
        if (!argument.hidden()) continue;
        const int axis = kind.back() == 'y' ? 1 : kind.back() == 'z' ? 2 : 0;
        if (kind.starts_with("hidden_block_count_"))
            put(bytes, argument, launch.grid[axis]);
        else if (kind.starts_with("hidden_group_size_"))
            put(bytes, argument, launch.block[axis]);
        else if (kind == "hidden_grid_dims")
            put(bytes, argument, dimensions);
        else if (kind == "hidden_dynamic_lds_size")
            put(bytes, argument, launch.dynamic_lds);
        else if (kind == "hidden_private_base")
            put(bytes, argument, static_cast<uint32_t>(kPrivateBase >> 32));
        else if (kind == "hidden_shared_base")
            put(bytes, argument, static_cast<uint32_t>(kSharedBase >> 32));
        else if (kind == "hidden_queue_ptr")
            put(bytes, argument, queue);
        // Workgroups are whole and offsets zero: hidden_remainder_*, hidden_global_offset_* stay 0.
        // No printf, hostcall, heap, default queue or multi-grid: null.
    }
    return bytes;
}

void mark_arguments(Memory& memory, const Launch& launch, uint64_t segment) {
    if (launch.kernel->arguments.empty()) memory.mark_written(segment, launch.arguments.size());
    for (const Argument& argument : launch.kernel->arguments) {
        // Whole dwords: compilers load a dword for an argument of a byte.
        const uint64_t begin = argument.offset / 4 * 4,
                       end = (uint64_t{argument.offset} + argument.size + 3) / 4 * 4;
        memory.mark_written(segment + begin, end - begin);
    }
}

}  // namespace emulator
