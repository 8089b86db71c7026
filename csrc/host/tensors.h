// What a launch does with its tensors before the kernel sees them: checks, and on the software
// MI300X the bytes that it may touch.
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../gfx942/params.h"
#include "hip_api.h"

namespace liteattention::gfx942 {

// Tells the software MI300X which host bytes a launch may touch, exactly; a GPU's tensors are
// device memory and need nothing. A launch that `stream` records in a graph runs later: then the
// graph is told, as a capture permits no registering.
class TouchedMemory {
   public:
    TouchedMemory(const hip::Library& library, hip::Stream stream)
        : library_(library),
          stream_(stream),
          capturing_(library.emulated() && library.Capturing(stream)) {}
    ~TouchedMemory() {
        while (count_ > 0) {
            const auto& [begin, bytes] = spans_[--count_];
            library_.host_spans().Remove(begin, bytes);
        }
    }
    TouchedMemory(const TouchedMemory&) = delete;
    TouchedMemory& operator=(const TouchedMemory&) = delete;

    void Add(const char* what, const void* begin, int64_t bytes) {
        if (!library_.emulated() || begin == nullptr) return;
        if (count_ == kMost) throw std::logic_error("TouchedMemory: make kMost larger");
        const std::pair<void*, size_t> span{const_cast<void*>(begin), static_cast<size_t>(bytes)};
        if (capturing_) {
            library_.Check(library_.GraphTouches(stream_, span.first, span.second),
                           std::string("lae_graph_touches of ") + what);
            return;
        }
        library_.Check(library_.host_spans().Add(span.first, span.second),
                       std::string("hipHostRegister of ") + what);
        spans_[count_++] = span;
    }
    void Add(const char* what, const void* begin, const Strides& strides, int64_t batch,
             int64_t seq, int64_t heads, int64_t dim, int64_t element_bytes = 2) {
        const int64_t last = (batch - 1) * strides.batch + (seq - 1) * strides.seq +
                             (heads - 1) * strides.head + dim;
        Add(what, begin, last * element_bytes);
    }

    void Add(const char* what, const uint16_t* begin, const RowStrides& strides, int64_t rows,
             int64_t heads, int64_t dim) {
        Add(what, begin, Strides{0, strides.row, strides.head}, 1, rows, heads, dim);
    }
    void Add(const char* what, const void* begin, const PageStrides& strides, int64_t pages,
             int64_t rows, int64_t heads, int64_t dim, int64_t element_bytes) {
        Add(what, begin, Strides{strides.page, strides.row, strides.head}, pages, rows, heads, dim,
            element_bytes);
    }

   private:
    static constexpr int kMost = 24;
    const hip::Library& library_;
    const hip::Stream stream_;
    const bool capturing_;
    std::array<std::pair<void*, size_t>, kMost> spans_{};
    int count_ = 0;
};

// Each appends what is wrong with a tensor, whose kernels want rows on multiples of kRowAlignBytes.
void CheckRows(std::vector<std::string>& reasons, const char* name, const void* pointer,
               const Strides& strides, int64_t batch, int64_t seq, int64_t heads,
               int64_t element_bytes = 2);
void CheckRows(std::vector<std::string>& reasons, const char* name, const void* pointer,
               const RowStrides& strides, int64_t rows, int64_t heads);
void CheckPages(std::vector<std::string>& reasons, const char* name, const void* pointer,
                const PageStrides& strides, int64_t pages, int64_t rows, int64_t heads,
                int64_t element_bytes);
// Where the scales of a cache lie; both are null if it has none there.
void CheckScales(std::vector<std::string>& reasons, const float* k_scale, const float* v_scale,
                 bool fp8);
void CheckWorkspace(std::vector<std::string>& reasons, const void* workspace);

// Throws std::invalid_argument with every reason.
[[noreturn]] void Refuse(const std::string& what, const std::vector<std::string>& reasons);

inline int32_t Int(int64_t value) { return static_cast<int32_t>(value); }

}  // namespace liteattention::gfx942
