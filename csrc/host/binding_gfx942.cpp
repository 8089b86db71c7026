// The MI300X launches as Python sees them.
#include <pybind11/numpy.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../gfx942/geometry.h"
#include "binding.h"
#include "hip_api.h"
#include "launch.h"
#include "plan.h"
#include "plan_ragged.h"

namespace liteattention::binding {

namespace {

gfx942::Strides ToGpuStrides(const Triple& t) { return {t[0], t[1], t[2]}; }

gfx942::RowStrides ToRowStrides(const std::array<int64_t, 2>& t) { return {t[0], t[1]}; }
gfx942::PageStrides ToPageStrides(const Triple& t) { return {t[0], t[1], t[2]}; }

template <typename Request>
void SetAddresses(Request& r, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, uintptr_t lse) {
    r.q = At<uint16_t>(q);
    r.k = At<uint16_t>(k);
    r.v = At<uint16_t>(v);
    r.out = At<uint16_t>(out);
    r.lse = At<float>(lse);
}

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

// A model of costs that refuses what it cannot divide by.
template <typename Cost>
auto Modelled(Cost cost) {
    return [cost](const gfx942::RaggedShape& shape, int64_t splits, int64_t compute_units) {
        std::vector<std::string> reasons = gfx942::RaggedReasons(shape);
        if (splits < 1) reasons.push_back("splits must be >= 1, got " + std::to_string(splits));
        if (compute_units < 1)
            reasons.push_back("compute units must be >= 1, got " + std::to_string(compute_units));
        gfx942::RaiseNoPlan(reasons);
        return cost(shape, splits, compute_units);
    };
}

}  // namespace

void BindGfx942(py::module_& m) {
    m.attr("GFX942_Q_BLOCK") = gfx942::kQBlock;
    m.attr("GFX942_K_BLOCK") = gfx942::kKBlock;
    m.attr("GFX942_WAVE_ROWS") = gfx942::kWaveRows;
    m.attr("GFX942_COMPUTE_UNITS") = gfx942::kComputeUnits;
    m.attr("GFX942_ROW_GUARD") = gfx942::kRowGuard;

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
        .def("current_stream",
             [](const hip::Library& library, int) {
                 return reinterpret_cast<uintptr_t>(library.CurrentStream());
             })
        .def("capturing",
             [](const hip::Library& library) { return library.Capturing(library.CurrentStream()); })
        .def(
            "graph_memory",
            [](const hip::Library& library, uintptr_t stream, size_t bytes, uintptr_t contents) {
                return reinterpret_cast<uintptr_t>(
                    library.GraphMemory(At<void>(stream), bytes, At<void>(contents)));
            },
            py::arg("stream"), py::arg("size"), py::arg("contents") = 0)
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
        .def_readonly("tiles", &L::tiles)
        .def_readonly("slots", &L::slots)
        .def_readonly("together", &L::together)
        .def_readonly("transpose_grid", &L::transpose_grid)
        .def_readonly("count_grid", &L::count_grid)
        .def_readonly("packs", &L::packs)
        .def_readonly("cuts", &L::cuts)
        .def_readonly("lpt_grid", &L::lpt_grid)
        .def_readonly("lite_grid", &L::lite_grid)
        .def_readonly("merge_grid", &L::merge_grid)
        .def_readonly("select_grid", &L::select_grid)
        .def_readonly("v_t_offset", &L::v_t_offset)
        .def_readonly("order_offset", &L::order_offset)
        .def_readonly("order_bytes", &L::order_bytes)
        .def_readonly("counts_offset", &L::counts_offset)
        .def_readonly("counts_bytes", &L::counts_bytes)
        .def_readonly("weights_offset", &L::weights_offset)
        .def_readonly("weights_bytes", &L::weights_bytes)
        .def_readonly("parts_offset", &L::parts_offset)
        .def_readonly("parts_bytes", &L::parts_bytes)
        .def_readonly("cuts_offset", &L::cuts_offset)
        .def_readonly("cuts_bytes", &L::cuts_bytes)
        .def_readonly("part_out_offset", &L::part_out_offset)
        .def_readonly("part_stats_offset", &L::part_stats_offset)
        .def_readonly("part_weights_offset", &L::part_weights_offset)
        .def_readonly("workspace_bytes", &L::workspace_bytes);
    m.def(
        "tiles_of",
        [](gfx942::Mapping mapping, uint32_t rows, uint32_t q_blocks, uint32_t count) {
            if (count > uint64_t{rows} * q_blocks)
                throw std::invalid_argument("count must be at most rows * q_blocks");
            std::vector<uint32_t> tiles(count);
            for (uint32_t w = 0; w < count; ++w)
                tiles[w] = gfx942::TileOf(mapping, w, rows, q_blocks);
            return py::array_t<uint32_t>(static_cast<py::ssize_t>(count), tiles.data());
        },
        py::arg("mapping"), py::arg("rows"), py::arg("q_blocks"), py::arg("count"));
    m.def("dense_reasons", &gfx942::DenseReasons, py::arg("shape"));
    m.def("plan_lite", &gfx942::PlanLite, py::arg("shape"), py::arg("compute_units"),
          py::arg("weighs") = false, py::arg("cuts") = true);
    m.def("plan_dense", &gfx942::PlanDense, py::arg("shape"), py::arg("compute_units"),
          py::arg("splits"));
    m.def("tail_cost", &gfx942::TailCost, py::arg("tail_tiles"), py::arg("splits"),
          py::arg("k_blocks"), py::arg("head_dim"), py::arg("compute_units"));
    m.attr("TAIL_MIN_GAIN") = gfx942::kMinGain;
    m.attr("TAIL_NEARLY_FULL") = gfx942::kNearlyFullShare;
    m.attr("MODELLED_GIGAHERTZ") = gfx942::kGigahertz;

    using RS = gfx942::RaggedShape;
    py::class_<RS>(m, "RaggedShape")
        .def(py::init([](int64_t requests, int64_t rows, int64_t q_heads, int64_t kv_heads,
                         int64_t head_dim, int64_t page_size, int64_t max_q_len, int64_t max_kv_len,
                         int64_t min_q_len, int64_t window, bool fp8,
                         std::optional<int64_t> lookahead) {
                 return RS{requests,
                           rows,
                           q_heads,
                           kv_heads,
                           head_dim,
                           page_size,
                           max_q_len,
                           max_kv_len,
                           min_q_len,
                           window,
                           fp8 ? gfx942::kFp8Bytes : gfx942::kSameBytes,
                           lookahead.value_or(gfx942::kSeesAll)};
             }),
             py::arg("requests"), py::arg("rows"), py::arg("q_heads"), py::arg("kv_heads"),
             py::arg("head_dim"), py::arg("page_size"), py::arg("max_q_len"), py::arg("max_kv_len"),
             py::arg("min_q_len") = 0, py::arg("window") = 0, py::arg("fp8") = false,
             py::arg("lookahead") = 0);
    using RT = gfx942::RaggedStage;
    py::class_<RT>(m, "RaggedStage")
        .def_readonly("split", &RT::split)
        .def_readonly("splits", &RT::splits)
        .def_readonly("grid", &RT::grid)
        .def_readonly("merge_grid", &RT::merge_grid)
        .def_readonly("parts", &RT::parts)
        .def_readonly("out_offset", &RT::out_offset)
        .def_readonly("stats_offset", &RT::stats_offset)
        .def_readonly("modelled_us", &RT::modelled_us)
        .def_readonly("modelled_unsplit_us", &RT::modelled_unsplit_us);
    using RP = gfx942::RaggedPlan;
    py::class_<RP>(m, "RaggedPlan")
        .def_readonly("decode", &RP::decode)
        .def_readonly("prefill", &RP::prefill)
        .def_readonly("prefill_room", &RP::prefill_room)
        .def_readonly("prefill_blocks", &RP::prefill_blocks)
        .def_readonly("workspace_bytes", &RP::workspace_bytes)
        .def_readonly("kv_bytes", &RP::kv_bytes);
    m.def("ragged_reasons", &gfx942::RaggedReasons, py::arg("shape"));
    m.def("plan_ragged", &gfx942::PlanRagged, py::arg("shape"), py::arg("compute_units"),
          py::arg("splits"));
    m.def("decode_cost", Modelled(&gfx942::DecodeCost), py::arg("shape"), py::arg("splits"),
          py::arg("compute_units"));
    m.def(
        "decode_work",
        [](int32_t q_len, int32_t kv_len, int32_t window, int32_t splits, int64_t head_dim) {
            const gfx942::DecodeWork work =
                gfx942::DecodeWorkOf(q_len, kv_len, window, splits, gfx942::DecodeKeys(head_dim));
            return std::make_tuple(work.first, work.blocks, work.parts);
        },
        py::arg("q_len"), py::arg("kv_len"), py::arg("window"), py::arg("splits"),
        py::arg("head_dim"));
    m.def("prefill_cost", Modelled(&gfx942::PrefillCost), py::arg("shape"), py::arg("splits"),
          py::arg("compute_units"));
    m.def("prefill_splits", &gfx942::PrefillSplitsOf, py::arg("tiles"), py::arg("room"),
          py::arg("splits"));
    m.def("prefill_parts", &gfx942::PrefillPartsOf, py::arg("blocks"), py::arg("part_blocks"),
          py::arg("splits"));
    m.def("is_decode", &gfx942::IsDecode, py::arg("q_len"), py::arg("group"));
    m.attr("DECODE_MOST_SPLITS") = gfx942::kMostDecodeSplits;
    m.attr("PREFILL_MOST_SPLITS") = gfx942::kMostPrefillSplits;
    m.attr("DECODE_ROWS") = gfx942::kDecodeRows;

    py::enum_<gfx942::Number>(m, "Number")
        .value("bf16_rtne", gfx942::Number::kBf16Rtne)
        .value("bf16_rtna", gfx942::Number::kBf16Rtna)
        .value("bf16_rtz", gfx942::Number::kBf16Rtz)
        .value("fp16", gfx942::Number::kFp16);
    // What follows is a launch with everything but its addresses.
    using R = gfx942::DenseRequest;
    py::class_<R>(m, "DenseLaunch")
        .def(py::init<>())
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
    py::class_<T>(m, "LiteLaunch")
        .def(py::init<>())
        .def_readwrite("threshold", &T::threshold)
        .def_readwrite("budget", &T::budget)
        .def_readwrite("descending", &T::descending)
        .def_readwrite("soft_skip", &T::soft_skip);

    using Q = gfx942::RaggedRequest;
    py::class_<Q>(m, "RaggedLaunch")
        .def(py::init<>())
        .def("set_strides",
             [](Q& r, const std::array<int64_t, 2>& q, const Triple& k, const Triple& v,
                const std::array<int64_t, 2>& out) {
                 r.q_strides = ToRowStrides(q);
                 r.k_strides = ToPageStrides(k);
                 r.v_strides = ToPageStrides(v);
                 r.out_strides = ToRowStrides(out);
             })
        .def_readwrite("pages", &Q::pages)
        .def_readwrite("page_rows", &Q::page_rows)
        .def_readwrite("table_width", &Q::table_width)
        .def_readwrite("table_stride", &Q::page_table_stride)
        .def_readwrite("scale", &Q::scale)
        .def_readwrite("k_scale", &Q::k_scale)
        .def_readwrite("v_scale", &Q::v_scale)
        .def_readwrite("soft_cap", &Q::soft_cap)
        .def_readwrite("number", &Q::number);
    using W = gfx942::WriteKvRequest;
    py::class_<W>(m, "WriteLaunch")
        .def(py::init<>())
        .def_readwrite("wide", &W::wide)
        .def("set_fp8",
             [](W& r, gfx942::Number number, double k_scale, double v_scale) {
                 r.cache = gfx942::Cache::kFp8;
                 r.number = number;
                 r.k_scale = k_scale;
                 r.v_scale = v_scale;
             })
        .def("set_strides",
             [](W& r, const std::array<int64_t, 2>& k, const std::array<int64_t, 2>& v,
                const Triple& k_cache, const Triple& v_cache) {
                 r.k_strides = ToRowStrides(k);
                 r.v_strides = ToRowStrides(v);
                 r.k_cache_strides = ToPageStrides(k_cache);
                 r.v_cache_strides = ToPageStrides(v_cache);
             })
        .def("set_shape", [](W& r, int64_t rows, int64_t kv_heads, int64_t head_dim, int64_t pages,
                             int64_t page_size) {
            r.rows = rows;
            r.kv_heads = kv_heads;
            r.head_dim = head_dim;
            r.pages = pages;
            r.page_size = page_size;
        });

    using D = gfx942::Device;
    py::class_<D>(m, "Gfx942Device")
        .def(py::init(&MakeDevice), py::arg("library"), py::arg("ordinal"), py::arg("objects"))
        .def_property_readonly("ordinal", &D::ordinal)
        .def_property_readonly("compute_units", &D::compute_units)
        .def(
            "attention",
            [](const D& device, const P& plan, R r, uintptr_t q, uintptr_t k, uintptr_t v,
               uintptr_t out, uintptr_t lse, uintptr_t workspace, uintptr_t stream) {
                SetAddresses(r, q, k, v, out, lse);
                device.Attention(plan, r, At<void>(workspace), At<void>(stream));
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "lite",
            [](const D& device, const L& plan, R r, T t, uintptr_t q, uintptr_t k, uintptr_t v,
               uintptr_t out, uintptr_t lse, uintptr_t read, uintptr_t write, uintptr_t must_do,
               uintptr_t must_skip, uintptr_t mass, uintptr_t limits, uintptr_t workspace,
               uintptr_t stream) {
                SetAddresses(r, q, k, v, out, lse);
                t.read = At<uint32_t>(read);
                t.write = At<uint32_t>(write);
                t.must_do = At<uint32_t>(must_do);
                t.must_skip = At<uint32_t>(must_skip);
                t.mass = At<float>(mass);
                t.limits = At<int32_t>(limits);
                device.Lite(plan, r, t, At<void>(workspace), At<void>(stream));
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "ragged",
            [](const D& device, const RP& plan, Q r, uintptr_t q, uintptr_t k, uintptr_t v,
               uintptr_t out, uintptr_t lse, uintptr_t sinks, uintptr_t q_start, uintptr_t kv_len,
               uintptr_t kv_start, uintptr_t page_table, uintptr_t k_scale, uintptr_t v_scale,
               uintptr_t workspace, uintptr_t stream) {
                SetAddresses(r, q, k, v, out, lse);
                r.sinks = At<float>(sinks);
                r.q_start = At<int32_t>(q_start);
                r.kv_len = At<int32_t>(kv_len);
                r.kv_start = At<int32_t>(kv_start);
                r.page_table = At<int32_t>(page_table);
                r.k_scale_at = At<float>(k_scale);
                r.v_scale_at = At<float>(v_scale);
                device.Ragged(plan, r, At<void>(workspace), At<void>(stream));
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "write_kv",
            [](const D& device, W r, uintptr_t k, uintptr_t v, uintptr_t k_cache, uintptr_t v_cache,
               uintptr_t slots, uintptr_t k_scale, uintptr_t v_scale, uintptr_t stream) {
                r.k = At<uint16_t>(k);
                r.v = At<uint16_t>(v);
                r.k_cache = At<uint16_t>(k_cache);
                r.v_cache = At<uint16_t>(v_cache);
                r.slots = At<void>(slots);
                r.k_scale_at = At<float>(k_scale);
                r.v_scale_at = At<float>(v_scale);
                device.WriteKv(r, At<void>(stream));
            },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "plan_lpt",
            [](const D& device, const L& plan, uintptr_t read, uintptr_t must_do,
               uintptr_t must_skip, uintptr_t order, uintptr_t counts, uintptr_t stream,
               uintptr_t parts, uintptr_t cuts) {
                T step;
                step.read = At<uint32_t>(read);
                step.must_do = At<uint32_t>(must_do);
                step.must_skip = At<uint32_t>(must_skip);
                device.PlanLpt(plan, step, At<int32_t>(order), At<int32_t>(counts),
                               At<gfx942::ListPart>(parts), At<gfx942::CutList>(cuts),
                               At<void>(stream));
            },
            py::arg("plan"), py::arg("read"), py::arg("must_do"), py::arg("must_skip"),
            py::arg("order"), py::arg("counts"), py::arg("stream"), py::arg("parts") = 0,
            py::arg("cuts") = 0, py::call_guard<py::gil_scoped_release>());
}

}  // namespace liteattention::binding
