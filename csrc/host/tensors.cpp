#include "tensors.h"

#include <stdexcept>

namespace liteattention::gfx942 {

void CheckRows(std::vector<std::string>& reasons, const char* name, const void* pointer,
               const Strides& strides, int64_t batch, int64_t seq, int64_t heads,
               int64_t element_bytes) {
    if (!pointer) {
        reasons.push_back(std::string(name) + " has no memory");
        return;
    }
    const std::array<std::pair<int64_t, int64_t>, 3> steps = {
        {{strides.batch, batch}, {strides.seq, seq}, {strides.head, heads}}};
    bool aligned = reinterpret_cast<uintptr_t>(pointer) % kRowAlignBytes == 0;
    for (const auto& [stride, size] : steps) {
        aligned = aligned && (size == 1 || stride * element_bytes % kRowAlignBytes == 0);
        if (size > 1 && stride < 0) reasons.push_back(std::string(name) + " has a negative stride");
    }
    if (!aligned)
        reasons.push_back(
            "every row of " + std::string(name) + " must start on a multiple of " +
            std::to_string(kRowAlignBytes) + " bytes (an element offset and strides that " +
            (element_bytes == 2 ? "are even" : "4 divides") + "): call .contiguous() on it");
}

void CheckRows(std::vector<std::string>& reasons, const char* name, const void* pointer,
               const RowStrides& strides, int64_t rows, int64_t heads) {
    CheckRows(reasons, name, pointer, {0, strides.row, strides.head}, 1, rows, heads);
}

// Kernels multiply page and row numbers with these distances as 32-bit numbers.
void CheckPages(std::vector<std::string>& reasons, const char* name, const void* pointer,
                const PageStrides& strides, int64_t pages, int64_t rows, int64_t heads,
                int64_t element_bytes) {
    CheckRows(reasons, name, pointer, {strides.page, strides.row, strides.head}, pages, rows, heads,
              element_bytes);
    if ((pages > 1 && strides.page > kMaxPageStride) || (rows > 1 && strides.row > kMaxPageStride))
        reasons.push_back("pages and rows of " + std::string(name) + " must be at most " +
                          std::to_string(kMaxPageStride) + " elements apart, got " +
                          std::to_string(strides.page) + " and " + std::to_string(strides.row));
}

void CheckScales(std::vector<std::string>& reasons, const float* k_scale, const float* v_scale,
                 bool fp8) {
    if (!k_scale && !v_scale) return;
    if (!fp8) reasons.emplace_back("k_scale and v_scale are for fp8 caches");
    for (const auto& [name, scale] : {std::pair{"k_scale", k_scale}, {"v_scale", v_scale}}) {
        if (!scale) reasons.push_back(std::string(name) + " has no memory");
        if (reinterpret_cast<uintptr_t>(scale) % sizeof(float) != 0)
            reasons.push_back(std::string(name) + " must start on a multiple of " +
                              std::to_string(sizeof(float)) + " bytes: call .clone() on it");
    }
}

void CheckWorkspace(std::vector<std::string>& reasons, const void* workspace) {
    if (!workspace || reinterpret_cast<uintptr_t>(workspace) % 16 != 0)
        reasons.emplace_back("the workspace must be 16-byte aligned memory");
}

void Refuse(const std::string& what, const std::vector<std::string>& reasons) {
    std::string text = what;
    for (size_t i = 0; i < reasons.size(); ++i) text += (i ? "; " : ": ") + reasons[i];
    throw std::invalid_argument(text);
}

}  // namespace liteattention::gfx942
