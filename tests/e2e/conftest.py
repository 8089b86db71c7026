"""A tiny model with random weights, as a folder that the commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from liteattention_e2e import tiny

    where = tmp_path_factory.mktemp("model")
    tiny.wan_pipeline(peaked=1.5).save_pretrained(where)
    (where / "generation.json").write_text(json.dumps({"frames": 8, "guidance": 3.0}))
    return where
