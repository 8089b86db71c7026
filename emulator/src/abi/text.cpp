#include "abi/text.h"

#include <cstdlib>
#include <cstring>

#include "abi/hip_types.h"

namespace emulator {

std::string& last_text_error() {
    thread_local std::string text;
    return text;
}

char* given(const std::string& text) {
    auto* copy = static_cast<char*>(std::malloc(text.size() + 1));
    if (copy) std::memcpy(copy, text.c_str(), text.size() + 1);
    return copy;
}

}  // namespace emulator

EXPORT void lae_free(char* text) { std::free(text); }

// Of the calling thread's latest failed lae_ function.
EXPORT const char* lae_last_error() { return emulator::last_text_error().c_str(); }
