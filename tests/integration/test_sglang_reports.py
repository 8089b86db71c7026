"""The files of a video request's report; without SGLang."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from liteattention_rocm import SkipPolicy
from liteattention_sglang import reports
from liteattention_sglang.generation import Generation


@pytest.mark.parametrize(
    "name",
    [
        "3f1c-0_a.b~",
        "a/b",
        "../../up",
        "/etc/passwd",
        "..",
        ".",
        "a b\nc",
        "käse",
        "a%2Fb",
        "\ud800",
    ],
)
def test_any_request_id_is_a_file_of_its_own_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep" / "reports"
    state = Generation(SkipPolicy(threshold=-1.0, warmup_steps=0), 2)
    q = torch.randn(1, 128, 1, 32)
    state.attend(q, q, q, layer="a", step=0, negative=False, scale=None, out=torch.empty_like(q))
    state.write(folder, name, [name], 3)
    state.write(folder, f"{name}.rank1", [name])
    stem = reports.file_name(name)
    assert {path.name for path in folder.iterdir()} == {
        f"{stem}.json", f"{stem}.npz", f"{stem}.rank1.json", f"{stem}.rank1.npz"
    }  # fmt: skip
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != folder] == []
    report = json.loads((folder / f"{stem}.json").read_text())
    assert report["requests"] == [name] and report["batched_requests"] == 3
    with np.load(folder / f"{stem}.npz") as stored:
        assert np.array_equal(stored["a/cond"], state.lists()["a/cond"].numpy())


def test_names_of_usual_ids_stay_and_no_two_ids_share_a_file() -> None:
    assert reports.file_name("request_1.A-b") == "request_1.A-b"
    names = ["a/b", "a%2Fb", "a%b", "a b", "a_b"]
    assert len({reports.file_name(name) for name in names}) == len(names)


def test_a_report_that_fails_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "r.json").mkdir()  # a file cannot take its place
    with pytest.raises(OSError, match=r"r\.json"):
        reports.write(tmp_path, "r", {"a": 1}, {"l": torch.zeros(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.npz"]


def test_a_folder_that_takes_no_report_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(reports.REPORT_VARIABLE, raising=False)
    reports.check_folder()
    assert reports.folder() is None
    monkeypatch.setenv(reports.REPORT_VARIABLE, str(tmp_path / "new" / "folder"))
    reports.check_folder()
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(reports.REPORT_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.raises(ValueError, match="no report can be written there") as error:
        reports.check_folder()
    assert reports.REPORT_VARIABLE in str(error.value) and "unset it" in str(error.value)
