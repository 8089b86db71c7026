// Why an image cannot be loaded.
#pragma once

#include <stdexcept>

namespace emulator {

// The image is damaged or uses something that is not supported; the text says what.
class BadCodeObject : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

// The image is sound, but for another processor.
class WrongTarget : public BadCodeObject {
   public:
    using BadCodeObject::BadCodeObject;
};

}  // namespace emulator
