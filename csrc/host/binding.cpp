// The Python module liteattention_rocm._core.
#include "binding.h"

PYBIND11_MODULE(_core, m) {
    m.doc() = "Compiled core of liteattention_rocm.";
    liteattention::binding::BindCpu(m);
    liteattention::binding::BindCuda(m);
    liteattention::binding::BindGfx942(m);
}
