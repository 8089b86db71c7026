// A storage type, for kernels that keep bf16 numbers only.
#pragma once

#include <stdint.h>

struct __hip_bfloat16 {
    uint16_t bits;
};
