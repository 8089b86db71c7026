"""Peers are plug-ins: what is installed runs, what is not is a line."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from liteattention_benchmark import cells, kernels, kernels_report, pages, peers, timing
from liteattention_benchmark.peers import Unavailable

CPU = torch.device("cpu")
F: Any = torch.nn.functional.scaled_dot_product_attention


def tensors() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 256, 64).bfloat16() for _ in range(3))


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = types.ModuleType(name)
    for function, body in functions.items():
        setattr(module, function, body)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("module", ["flash_attn", "flash_attn.cute", "aiter"])
@pytest.mark.parametrize("pair", [False, True])
def test_packages_get_tensors_by_rows_and_give_the_output(
    monkeypatch: pytest.MonkeyPatch, module: str, pair: bool
) -> None:
    def function(q: Any, k: Any, v: Any, causal: bool) -> Any:
        assert q.shape == (1, 256, 2, 64)
        out = F(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)
        return (out, None) if pair else out

    install(monkeypatch, "flash_attn")
    install(monkeypatch, module, flash_attn_func=function)
    (peer,) = (
        p
        for p in peers.PEERS
        if p.name
        == {"flash_attn": "flash-attn 2", "flash_attn.cute": "flash-attn 4", "aiter": "AITER"}[
            module
        ]
    )
    q, k, v = tensors()
    for causal in (False, True):
        assert torch.equal(peer.make(q, k, v, causal)(), F(q, k, v, is_causal=causal))


def test_every_peer_that_is_not_here_says_why() -> None:
    q, k, v = tensors()
    said = {}
    for peer in peers.PEERS:
        if "SDPA" in peer.name or peer.name == "FlexAttention":
            continue
        with pytest.raises(Unavailable) as caught:
            peer.make(q, k, v, False)
        said[peer.name] = str(caught.value)
    assert said["flash-attn 4"] == "package flash_attn.cute is not installed"
    assert said["Triton tutorial"].endswith("name your copy with --peer")
    with pytest.raises(Unavailable, match="package spas_sage_attn is not installed"):
        peers.sparge(q, k, v, torch.ones(1, 2, 2, 2, dtype=torch.bool), (128, 128))
    with pytest.raises(Unavailable, match="package flash_attn_interface is not installed"):
        peers.fa3(q, k, v, False, None)


@pytest.mark.parametrize(("major", "block"), [(9, (64, 128)), (8, (128, 64))])
def test_sparge_gets_the_same_tiles_in_its_own_blocks(
    monkeypatch: pytest.MonkeyPatch, major: int, block: tuple[int, int]
) -> None:
    seen = []

    def function(q: Any, k: Any, v: Any, mask_id: Any) -> Any:
        seen.append(mask_id)
        return q

    install(monkeypatch, "spas_sage_attn", block_sparse_sage2_attn_cuda=function)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    q = torch.randn(1, 2, 300, 64)
    tiles = torch.rand(1, 2, 3, 3) < 0.5
    peers.sparge(q, q, q, tiles, (128, 128))()
    (mask,) = seen
    rows = torch.arange(mask.shape[2]) * block[0] // 128
    columns = torch.arange(mask.shape[3]) * block[1] // 128
    assert mask.shape[2:] == (-(-300 // block[0]), -(-300 // block[1]))
    assert torch.equal(mask.bool(), tiles[:, :, rows][:, :, :, columns])
    with pytest.raises(Unavailable, match="do not divide tiles of"):
        peers.sparge(q, q, q, tiles, (96, 64))


def test_a_peer_of_ones_own_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "06-mine.py"
    file.write_text(
        "import torch\n"
        "def attention(q, k, v, causal, scale):\n"
        "    assert all(x.is_contiguous() for x in (q, k, v))\n"
        "    return torch.nn.functional.scaled_dot_product_attention(\n"
        "        q, k, v, is_causal=causal, scale=scale)\n"
        "def fails(q, k, v, causal, scale):\n"
        "    assert q.shape[-1] == 256, 'built for 256 alone'\n"
    )
    more = dict([peers.given(f"mine={file}:attention"), peers.given(f"none={file}:absent")])
    more |= [peers.given(f"fails={file}:fails")]
    more |= [peers.given("gone=no_such_module:attention")]
    config = cells.Config(
        rounds=3,
        warmup=1,
        dense=({"batch": 1, "heads": 2, "length": 64, "head_dim": 64},),  # type: ignore[arg-type]
    )
    rows = {row.contender: row for row in kernels.run(config, CPU, more=more)}
    assert rows["mine"].error == pytest.approx(rows["SDPA"].error, rel=0.5)
    assert rows["none"].absent == f"{file} has no absent"
    assert rows["fails"].absent == "AssertionError: built for 256 alone"
    assert "no_such_module" in rows["gone"].absent
    assert "- none:" in kernels_report.to_markdown(config, list(rows.values()), {}, "command")


def test_a_peer_of_ones_own_also_runs_beside_lists(tmp_path: Path) -> None:
    (name, make) = peers.given("mine, fast=torch.nn.functional:scaled_dot_product_attention")
    gpu = torch.device("cuda")
    beside = peers.self_attention_peers(gpu, None, {name: make}, lite=True)
    assert list(beside) == ["cuDNN (SDPA)", "FA3", name] and beside[name] is make
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def attention(q, k, v, causal, scale):\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)\n"
    )
    more = dict([peers.given(f"mine, fast={file}:attention")])
    lite = {"batch": 1, "heads": 1, "length": 256, "head_dim": 64, "sparsity": 0.5}
    config = cells.Config(rounds=3, warmup=1, lite=(lite,))  # type: ignore[arg-type]
    rows = kernels.run(config, CPU, more=more)
    assert next(row for row in rows if row.contender == name).error < 0.01  # against all tiles
    text = kernels_report.to_markdown(config, rows, {}, "command")
    assert "| mine, fast ms |" in " ".join(text.split())
    # what computes all tiles is no point of the lists' work
    roofs = timing.Ceilings(1.0, 1.0)
    page = pages.kernels(config, rows, {"commit": "", "torch": ""}, "command", roofs)
    assert "ours, lite, 1," in page and f"{name}, 1," not in page


@pytest.mark.parametrize("text", ["", "x", "x=y", "=y:z", "x=:z", "x=y:", "x=y:a b"])
def test_what_is_no_peer(text: str) -> None:
    with pytest.raises(ValueError, match="a peer is NAME=FILE_OR_MODULE:FUNCTION, got"):
        peers.given(text)
