// The Python module liteattention_rocm._core: the only file that knows pybind11. Tensors arrive as
// addresses, strides and sizes that the Python side has checked.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../cpu/attention.h"
#include "../gfx942/geometry.h"
#include "hip_api.h"
#include "launch.h"
#include "plan.h"

namespace py = pybind11;
namespace cpu = liteattention::cpu;
namespace gfx942 = liteattention::gfx942;
namespace hip = liteattention::hip;

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

gfx942::Strides ToGpuStrides(const Triple& t) { return {t[0], t[1], t[2]}; }

// (file, image, [(kernel, bytes of its argument)])
using ObjectTuple =
    std::tuple<std::string, py::bytes, std::vector<std::pair<std::string, int64_t>>>;

std::unique_ptr<gfx942::Device> MakeDevice(std::shared_ptr<hip::Library> library, int ordinal,
                                           const std::vector<ObjectTuple>& objects) {
    std::vector<gfx942::CodeObject> made;
    for (const auto& [file, image, kernels] : objects) {
        gfx942::CodeObject& object = made.emplace_back();
        object.file = file;
        object.image = image;
        for (const auto& [name, bytes] : kernels) object.kernels.push_back({name, bytes});
    }
    py::gil_scoped_release release;
    return std::make_unique<gfx942::Device>(std::move(library), ordinal, std::move(made));
}

void BindGfx942(py::module_& m) {
    m.attr("GFX942_Q_BLOCK") = gfx942::kQBlock;
    m.attr("GFX942_K_BLOCK") = gfx942::kKBlock;
    m.attr("GFX942_WAVE_ROWS") = gfx942::kWaveRows;
    m.attr("GFX942_COMPUTE_UNITS") = gfx942::kComputeUnits;
    m.attr("GFX942_MAX_LITE_KEYS") = gfx942::kMaxLiteWords * 32 * gfx942::kKBlock;

    py::register_exception<hip::Unavailable>(m, "HipUnavailable", PyExc_RuntimeError);
    py::register_exception<hip::CallFailed>(m, "HipError", PyExc_RuntimeError);

    py::class_<hip::Library, std::shared_ptr<hip::Library>>(m, "HipLibrary")
        .def(py::init([](const std::string& path) {
                 // pybind11 holds no pointers to const; the class has no way to change.
                 return std::const_pointer_cast<hip::Library>(hip::Library::Open(path));
             }),
             py::arg("path"), py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("path", &hip::Library::path)
        .def_property_readonly("emulated", &hip::Library::emulated)
        .def("device_count", &hip::Library::DeviceCount)
        .def("version", &hip::Library::Version);

    using S = gfx942::DenseShape;
    py::class_<S>(m, "DenseShape")
        .def(py::init([](int64_t batch, int64_t q_heads, int64_t kv_heads, int64_t q_len,
                         int64_t kv_len, int64_t head_dim) {
                 return S{batch, q_heads, kv_heads, q_len, kv_len, head_dim};
             }),
             py::arg("batch"), py::arg("q_heads"), py::arg("kv_heads"), py::arg("q_len"),
             py::arg("kv_len"), py::arg("head_dim"));
    using P = gfx942::DensePlan;
    py::enum_<gfx942::Split>(m, "Split")
        .value("pays", gfx942::Split::kPays)
        .value("even", gfx942::Split::kEven)
        .value("nearly_full", gfx942::Split::kNearlyFull)
        .value("too_short", gfx942::Split::kTooShort)
        .value("forced", gfx942::Split::kForced);
    py::enum_<gfx942::Mapping>(m, "Mapping")
        .value("swizzled_head_first", gfx942::Mapping::kSwizzledHeadFirst)
        .value("naive_head_first", gfx942::Mapping::kNaiveHeadFirst)
        .value("swizzled_block_first", gfx942::Mapping::kSwizzledBlockFirst)
        .value("naive_block_first", gfx942::Mapping::kNaiveBlockFirst);
    py::class_<P>(m, "DensePlan")
        .def_readonly("split", &P::split)
        .def_readonly("mapping", &P::mapping)
        .def_readonly("modelled_us", &P::modelled_us)
        .def_readonly("modelled_unsplit_us", &P::modelled_unsplit_us)
        .def_readonly("whole_tiles", &P::whole_tiles)
        .def_readonly("tail_tiles", &P::tail_tiles)
        .def_readonly("splits", &P::splits)
        .def_readonly("transpose_grid", &P::transpose_grid)
        .def_readonly("dense_grid", &P::dense_grid)
        .def_readonly("merge_grid", &P::merge_grid)
        .def_readonly("v_t_offset", &P::v_t_offset)
        .def_readonly("part_out_offset", &P::part_out_offset)
        .def_readonly("part_stats_offset", &P::part_stats_offset)
        .def_readonly("workspace_bytes", &P::workspace_bytes);
    using L = gfx942::LitePlan;
    py::class_<L>(m, "LitePlan")
        .def_readonly("transpose_grid", &L::transpose_grid)
        .def_readonly("lpt_grid", &L::lpt_grid)
        .def_readonly("lite_grid", &L::lite_grid)
        .def_readonly("v_t_offset", &L::v_t_offset)
        .def_readonly("order_offset", &L::order_offset)
        .def_readonly("workspace_bytes", &L::workspace_bytes);
    m.def("dense_reasons", &gfx942::DenseReasons, py::arg("shape"));
    m.def("lite_reasons", &gfx942::LiteReasons, py::arg("shape"));
    m.def("plan_lite", &gfx942::PlanLite, py::arg("shape"));
    m.def("plan_dense", &gfx942::PlanDense, py::arg("shape"), py::arg("compute_units"),
          py::arg("splits"));
    m.def("tail_cost", &gfx942::TailCost, py::arg("tail_tiles"), py::arg("splits"),
          py::arg("k_blocks"), py::arg("head_dim"), py::arg("compute_units"));
    m.attr("TAIL_MIN_GAIN") = gfx942::kMinGain;
    m.attr("TAIL_NEARLY_FULL") = gfx942::kNearlyFullShare;

    py::enum_<gfx942::Number>(m, "Number")
        .value("bf16_rtne", gfx942::Number::kBf16Rtne)
        .value("bf16_rtna", gfx942::Number::kBf16Rtna)
        .value("bf16_rtz", gfx942::Number::kBf16Rtz)
        .value("fp16", gfx942::Number::kFp16);
    using R = gfx942::DenseRequest;
    py::class_<R>(m, "DenseRequest")
        .def(py::init<>())
        .def("set_pointers",
             [](R& r, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t lse) {
                 r.q = At<uint16_t>(q);
                 r.k = At<uint16_t>(k);
                 r.v = At<uint16_t>(v);
                 r.out = At<uint16_t>(out);
                 r.lse = At<float>(lse);
             })
        .def("set_strides",
             [](R& r, const Triple& q, const Triple& k, const Triple& v, const Triple& out) {
                 r.q_strides = ToGpuStrides(q);
                 r.k_strides = ToGpuStrides(k);
                 r.v_strides = ToGpuStrides(v);
                 r.out_strides = ToGpuStrides(out);
             })
        .def_readwrite("number", &R::number)
        .def_readwrite("scale", &R::scale);
    using T = gfx942::LiteStep;
    py::class_<T>(m, "LiteStep")
        .def(py::init<>())
        .def("set_bitmaps",
             [](T& t, uintptr_t read, uintptr_t write, uintptr_t must_do, uintptr_t must_skip) {
                 t.read = At<uint32_t>(read);
                 t.write = At<uint32_t>(write);
                 t.must_do = At<uint32_t>(must_do);
                 t.must_skip = At<uint32_t>(must_skip);
             })
        .def_readwrite("threshold", &T::threshold)
        .def_readwrite("descending", &T::descending)
        .def_readwrite("soft_skip", &T::soft_skip);

    using D = gfx942::Device;
    py::class_<D>(m, "Gfx942Device")
        .def(py::init(&MakeDevice), py::arg("library"), py::arg("ordinal"), py::arg("objects"))
        .def_property_readonly("ordinal", &D::ordinal)
        .def_property_readonly("compute_units", &D::compute_units)
        .def(
            "attention",
            [](const D& device, const P& plan, const R& request, uintptr_t workspace,
               uintptr_t stream) {
                device.Attention(plan, request, At<void>(workspace), At<void>(stream));
            },
            py::arg("plan"), py::arg("request"), py::arg("workspace"), py::arg("stream"),
            py::call_guard<py::gil_scoped_release>())
        .def(
            "lite",
            [](const D& device, const L& plan, const R& request, const T& step, uintptr_t workspace,
               uintptr_t stream) {
                device.Lite(plan, request, step, At<void>(workspace), At<void>(stream));
            },
            py::arg("plan"), py::arg("request"), py::arg("step"), py::arg("workspace"),
            py::arg("stream"), py::call_guard<py::gil_scoped_release>())
        .def(
            "plan_lpt",
            [](const D& device, uintptr_t skip, uintptr_t must_do, uintptr_t must_skip,
               uintptr_t order, int64_t rows, int64_t q_blocks, int64_t words, uintptr_t stream) {
                device.PlanLpt({At<uint32_t>(skip), At<uint32_t>(must_do), At<uint32_t>(must_skip),
                                At<int32_t>(order), rows, q_blocks, words},
                               At<void>(stream));
            },
            py::arg("skip"), py::arg("must_do"), py::arg("must_skip"), py::arg("order"),
            py::arg("rows"), py::arg("q_blocks"), py::arg("words"), py::arg("stream"),
            py::call_guard<py::gil_scoped_release>());
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

    BindGfx942(m);
}
