"""A stand-in for CUDA graphs on a CPU: it repeats launches at the addresses of their capture.

It computes the model anew from the graph's input tensors, but each attention call with what was
launched at capture: the same kernel, limit, direction, lists. State in Python is not asked, as a
CUDA graph does not ask it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from liteattention_rocm import LiteAttention
from liteattention_rocm.contract import dense_tensors, lite_tensors


class StandIn:
    """Records and repeats as :class:`.graphs.CudaRecorder` does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def renew(self, device: torch.device) -> None:
        """Nothing is shared between graphs here."""

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        frozen: list[tuple[Any, Any, tuple[Any, ...]]] = []
        call, begin = LiteAttention.__call__, LiteAttention._begin
        turns: list[Any] = []

        def noted_begin(lite: Any, *given: Any) -> Any:
            turns.append(begin(lite, *given))
            return turns[-1]

        def noted_call(lite: Any, *tensors: Any, **options: Any) -> Any:
            result = call(lite, *tensors, **options)
            if turns:  # none where the policy is off
                turn, plan = turns.pop(), lite._counters.noting.calls[-1].plan
                masks = () if turn.tiles is None else (turn.tiles.must_do, turn.tiles.must_skip)
                lists = (turn.read, turn.write, *masks, None, None, turn.limits)
                lists = () if turn.kind is None else lists
                frozen.append((plan.calls[turn.kind], turn, lists))
            return result

        with self._patch.context() as patch:
            patch.setattr(LiteAttention, "_begin", noted_begin)
            patch.setattr(LiteAttention, "__call__", noted_call)
            result = run()

        def replay() -> None:
            left = iter(frozen)

            def repeated(lite: Any, q: Any, k: Any, v: Any, *, out: Any, **options: Any) -> Any:
                if not frozen:
                    return call(lite, q, k, v, out=out, **options)
                bound, turn, lists = next(left)
                bound.run((lite_tensors if lists else dense_tensors)((q, k, v, out, None, *lists)))
                if turn.write is not None and not lists:
                    turn.write.copy_(turn.tiles.full)
                return out

            with self._patch.context() as patch:
                patch.setattr(LiteAttention, "__call__", repeated)
                (computed,) = run()
            result[0].copy_(computed)
            assert next(left, None) is None

        return replay, result
