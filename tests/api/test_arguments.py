"""Single arguments of an unusual kind: one rule for each, at every entry point."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from liteattention_rocm import PagedBatch, attention, lite_attention, merge_states
from liteattention_rocm.lite import bitmap

from .test_fuzz import INVALID

HUGE = [10**400, -(10**400), 10**5000, Fraction(10) ** 400]
ATTENDING = ["attention", "lite_attention", "attention_varlen", "attention_paged"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes of nested and sparse tensors
        yield


def refused(name: str, changes: dict[str, Any], *texts: str) -> None:
    function, make = INVALID[name]
    for _ in range(2):  # after a good call of the same kind, too
        with pytest.raises((TypeError, ValueError)) as caught:
            function(**(make() | changes))
        for text in texts:
            assert text in str(caught.value)
        function(**make())


@pytest.mark.parametrize("name", [*ATTENDING, "write_kv", "default_geometry"])
@pytest.mark.parametrize("engine", [3, True, b"cpu", ["cpu"], torch.device("cpu")])
def test_engines_are_named_by_strings(name: str, engine: Any) -> None:
    refused(
        name, {"engine": engine}, f"engine must be a string or None, got {type(engine).__name__}"
    )
    refused(name, {"engine": "magic"}, "unknown engine 'magic': this build has cpu, gfx942")


def test_flags_are_bools() -> None:
    for name, wrong in (("soft_skip", "no"), ("descending", 1), ("soft_skip", np.bool_(True))):
        text = f"{name} must be a bool, got {type(wrong).__name__}"
        refused("lite_attention", {name: wrong}, text)
    for entry in ATTENDING:
        refused(entry, {"return_lse": 1}, "return_lse must be a bool, got int")


@pytest.mark.parametrize("huge", HUGE, ids=["10**400", "-10**400", "10**5000", "Fraction"])
def test_numbers_that_no_float_holds(huge: Any) -> None:
    for entry in ATTENDING:
        refused(entry, {"scale": huge}, "scale must be finite, got")
    for entry in ("attention_varlen", "attention_paged"):
        refused(entry, {"soft_cap": huge}, "soft_cap must be finite, got")
    for entry in ("attention_paged", "write_kv"):
        refused(entry, {"k_scale": huge}, "k_scale must be finite, got")
    if huge > 0:
        refused("lite_attention", {"threshold": huge}, "must be <= 0, got")


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int64, Fraction])
def test_real_numbers_of_every_type_are_taken(kind: Callable[[Any], Any]) -> None:
    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    assert torch.equal(attention(q, k, v, scale=kind(1)), attention(q, k, v, scale=1.0))
    read = bitmap.full(1, 2, 1, 1)
    lists = [torch.empty_like(read) for _ in range(2)]
    for write, threshold in zip(lists, (kind(-2), -2.0), strict=True):
        lite_attention(q, k, v, read, write, threshold=threshold)
    assert torch.equal(*lists)
    for entry in ATTENDING:
        for wrong in (True, np.bool_(True)):
            text = f"scale must be a number, got {type(wrong).__name__}"
            refused(entry, {"scale": wrong}, text)
    refused("lite_attention", {"threshold": True}, "threshold must be a number, got bool")


@pytest.mark.parametrize("huge", [2**31, 2**63, 10**400, np.int64(2**62)])
def test_windows_and_bounds_may_be_larger_than_any_length(huge: Any) -> None:
    for entry in ("attention_varlen", "attention_paged"):
        function, make = INVALID[entry]
        torch.manual_seed(0)
        call = make()
        bounds = [name for name in call if name.startswith("max_")]
        expected = function(**call | {"window": None, "out": None})
        expected_ahead = function(**call | {"window": None, "out": None, "causal": False})
        for changes in ({"window": huge}, dict.fromkeys(bounds, huge) | {"window": None}):
            for engine in ("cpu", "reference"):
                got = function(**call | changes | {"out": None, "engine": engine})
                assert torch.allclose(got, expected, atol=1e-5)
                far = {"window": None, "causal": False, "lookahead": huge, "engine": engine}
                got = function(**call | far | {"out": None})
                assert torch.allclose(got, expected_ahead, atol=1e-5)
        refused(entry, {"lookahead": -huge, "causal": False}, "lookahead must be at least 0, got")
        refused(entry, {"window": -huge}, "window must be at least 1, got")
        for name in bounds:
            refused(entry, {name: -huge}, f"{name} must not be negative, got")
    batch = PagedBatch(
        torch.tensor([0, 1]).int(), torch.tensor([2]).int(), torch.zeros(1, 1).int(),
        max_q_len=huge, max_kv_len=huge,
    )  # fmt: skip
    assert type(batch.max_q_len) is int and batch.max_q_len == batch.max_kv_len == 2**31 - 1


#: What to make of a good tensor, and what is said of it; None: it is right, or a negated view.
UNUSUAL: dict[str, tuple[Callable[[torch.Tensor], Any], str | None]] = {
    "sparse": (lambda x: x.to_sparse(), "must be strided, got torch.sparse_coo: call .to_dense()"),
    "csr": (lambda x: torch.eye(4).to_sparse_csr(), "must be strided, got torch.sparse_csr"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "must be strided, got torch._mkldnn"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x]), "is a nested tensor"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        "is a nested tensor: pass packed sequences to attention_varlen",
    ),
    "lazy": (lambda x: torch.nn.UninitializedParameter(), "a parameter that is not initialized"),
    "zero": (lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype), "has no memory"),
    "negated": (lambda x: torch._neg_view(-x), None),
    "quantized": (lambda x: torch.quantize_per_tensor(x.float(), 1, 0, torch.quint8), "must"),
    "complex": (lambda x: x.to(torch.complex64), "must"),
    "meta": (lambda x: x.to("meta"), ""),
    "numpy": (lambda x: x.numpy(), "must be a tensor, got ndarray"),
}


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("name", [n for n in INVALID if n != "merge_states"])
def test_tensors_that_are_not_plain_memory(name: str, kind: str) -> None:
    make, text = UNUSUAL[kind]
    for argument, good in INVALID[name][1]().items():
        if not isinstance(good, torch.Tensor):
            continue
        if kind == "mkldnn" and good.dtype != torch.float32:
            continue
        if name == "default_geometry" and kind in ("negated", "meta", "complex", "quantized"):
            continue  # only its size and device matter
        if text is None:
            function, arguments = INVALID[name]
            torch.manual_seed(0)
            plain = function(**arguments())
            torch.manual_seed(0)
            given = arguments()
            try:
                same = function(**given | {argument: make(given[argument])})
            except ValueError as error:
                assert f"{argument} must not be a negated view" in str(error)
            else:
                assert str(same) == str(plain)
            continue
        refused(name, {argument: make(good)}, text, argument if text else "")


def test_merging_what_cannot_be_merged() -> None:
    outs, lses = [torch.zeros(1, 3, 2, 4)] * 2, [torch.zeros(1, 2, 3)] * 2
    for wrong, text in (
        (3, "outs must be a sequence of tensors, got int"),
        ("ab", "outs must be a sequence of tensors, got str"),
        ([1, 2], "outs[0] must be a tensor, got int"),
        ([outs[0].int()] * 2, "outs must be bf16, fp16, fp32 or fp64, got torch.int32"),
        ([outs[0], outs[0].half()], "outs[1] is torch.float16 [1, 3, 2, 4], outs[0] is torch.f"),
        ([outs[0], outs[0][:, :1]], "outs[1] is torch.float32 [1, 1, 2, 4]"),
        ([outs[0], outs[0].to("meta")], "outs[1] is on meta, outs[0] on cpu"),
        ([outs[0].to_sparse(), outs[0]], "outs[0] must be strided"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            merge_states(wrong, lses)  # type: ignore[arg-type]
        assert text in str(caught.value)
    for bad, text in (
        ([lses[0], lses[0].double()], "lses[1] must be torch.float32"),
        ([lses[0], lses[0].to("meta")], "lses[1] is on meta"),
        (lses[:1], "equally many and at least one, got 2 and 1"),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            merge_states(outs, bad)
        assert text in str(caught.value)
    stacked = merge_states(torch.stack(outs), torch.stack(lses))  # type: ignore[arg-type]
    assert torch.equal(stacked[1], merge_states(outs, lses)[1])
    layout: Any = np.array(["bshd", "bhsd"])
    with pytest.raises(ValueError, match="layout must be one of"):
        merge_states(outs, lses, layout=layout)


def test_subclasses_and_parameters_compute_what_they_hold() -> None:
    class Watched(torch.Tensor):
        """A subclass that brings nothing of its own."""

    q, k, v = (torch.randn(1, 20, 2, 8) for _ in range(3))
    expected = attention(q, k, v)
    for kind in (
        lambda x: x.as_subclass(Watched),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        torch.nn.Buffer,
    ):
        assert torch.equal(attention(kind(q), k, kind(v)).as_subclass(torch.Tensor), expected)
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        attention(q[0].as_subclass(Watched), k, v)
    assert math.isfinite(expected.sum())
