// The Python module liteattention_rocm._core: the only file that knows pybind11. Tensors arrive as
// addresses, strides and sizes that the Python side has checked.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "../cpu/attention.h"

namespace py = pybind11;
namespace cpu = liteattention::cpu;

namespace {

using Triple = std::array<int64_t, 3>;

template <class T>
T* At(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

cpu::Strides ToStrides(const Triple& t) { return {t[0], t[1], t[2]}; }

cpu::Isa ParseIsa(const std::string& name) {
    for (const cpu::IsaName& known : cpu::kIsaNames) {
        if (name != known.name) continue;
        for (cpu::Isa isa : cpu::AvailableIsas())
            if (isa == known.isa) return isa;
    }
    throw py::value_error("instruction set not available here: " + name);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "Compiled core of liteattention_rocm.";
    m.attr("CPU_K_BLOCK") = cpu::kKBlock;
    m.attr("CPU_ROW_STEP") = cpu::kRowStep;
    m.attr("CPU_MAX_Q_BLOCK") = cpu::kMaxQBlock;
    m.attr("CPU_MAX_VOTE_ROWS") = cpu::kMaxQTile;
    m.attr("CPU_MAX_HEAD_DIM") = cpu::kMaxHeadDim;

    py::enum_<cpu::DType>(m, "DType")
        .value("bf16", cpu::DType::kBf16)
        .value("fp16", cpu::DType::kFp16)
        .value("fp32", cpu::DType::kFp32);
    py::enum_<cpu::Rounding>(m, "Rounding")
        .value("rtne", cpu::Rounding::kRtne)
        .value("rtna", cpu::Rounding::kRtna)
        .value("rtz", cpu::Rounding::kRtz);

    using P = cpu::AttentionParams;
    py::class_<P>(m, "AttentionParams")
        .def(py::init<>())
        .def("set_pointers",
             [](P& p, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t lse) {
                 p.q = At<void>(q);
                 p.k = At<void>(k);
                 p.v = At<void>(v);
                 p.out = At<void>(out);
                 p.lse = At<float>(lse);
             })
        .def("set_shape",
             [](P& p, int64_t batch, int64_t q_heads, int64_t kv_heads, int64_t q_len,
                int64_t kv_len, int64_t head_dim) {
                 p.batch = batch;
                 p.q_heads = q_heads;
                 p.kv_heads = kv_heads;
                 p.q_len = q_len;
                 p.kv_len = kv_len;
                 p.head_dim = head_dim;
             })
        .def("set_strides",
             [](P& p, const Triple& q, const Triple& k, const Triple& v, const Triple& out) {
                 p.q_strides = ToStrides(q);
                 p.k_strides = ToStrides(k);
                 p.v_strides = ToStrides(v);
                 p.out_strides = ToStrides(out);
             })
        .def_readwrite("dtype", &P::dtype)
        .def_readwrite("rounding", &P::rounding)
        .def_readwrite("scale", &P::scale)
        .def_readwrite("causal", &P::causal)
        .def_readwrite("threads", &P::threads);

    using L = cpu::LiteParams;
    py::class_<L>(m, "LiteParams")
        .def(py::init<>())
        .def("set_bitmaps",
             [](L& l, uintptr_t read, uintptr_t write, uintptr_t must_do, uintptr_t must_skip) {
                 l.read = At<uint32_t>(read);
                 l.write = At<uint32_t>(write);
                 l.must_do = At<uint32_t>(must_do);
                 l.must_skip = At<uint32_t>(must_skip);
             })
        .def_readwrite("q_block", &L::q_block)
        .def_readwrite("vote_rows", &L::vote_rows)
        .def_readwrite("threshold", &L::threshold)
        .def_readwrite("descending", &L::descending)
        .def_readwrite("soft_skip", &L::soft_skip);

    m.def("cpu_available_isas", [] {
        std::vector<std::string> names;
        for (cpu::Isa isa : cpu::AvailableIsas())
            for (const cpu::IsaName& known : cpu::kIsaNames)
                if (known.isa == isa) names.emplace_back(known.name);
        return names;
    });
    m.def(
        "cpu_attention",
        [](const P& params, const L* lite, const std::string& isa) {
            const cpu::Isa path = ParseIsa(isa);
            py::gil_scoped_release release;
            cpu::Attention(params, lite, path);
        },
        py::arg("params"), py::arg("lite").none(true), py::arg("isa"));
}
