from __future__ import annotations

import math

import numpy as np
import pytest

from liteattention_e2e import metrics


def video(seed: int, *, frames: int = 2, side: int = 24) -> metrics.Frames:
    return np.random.default_rng(seed).integers(0, 256, (frames, side, side, 3), dtype=np.uint8)


def test_psnr_of_a_known_error() -> None:
    a = np.full((1, 16, 16, 3), 100, np.uint8)
    b = a.copy()
    b[0, :8] += 10  # half of the pixels are off by 10: mean squared error 50
    assert metrics.psnr(a, b) == pytest.approx(10 * math.log10(255**2 / 50), rel=1e-12)
    assert metrics.psnr(a, a) == math.inf


def naive_ssim(a: metrics.Frames, b: metrics.Frames) -> float:
    x, y = a.astype(np.float64) / 255, b.astype(np.float64) / 255
    line = np.exp(-(np.arange(-5, 6) ** 2) / 4.5)
    window = np.outer(line, line) / line.sum() ** 2
    values = []
    for frame in range(x.shape[0]):
        for channel in range(3):
            for i in range(x.shape[1] - 10):
                for j in range(x.shape[2] - 10):
                    p = x[frame, i : i + 11, j : j + 11, channel]
                    q = y[frame, i : i + 11, j : j + 11, channel]
                    mp, mq = (window * p).sum(), (window * q).sum()
                    vp = (window * (p - mp) ** 2).sum()
                    vq = (window * (q - mq) ** 2).sum()
                    cov = (window * (p - mp) * (q - mq)).sum()
                    values.append(
                        (2 * mp * mq + 1e-4)
                        * (2 * cov + 9e-4)
                        / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4))
                    )
    return float(np.mean(values))


def test_ssim_equals_its_definition_window_by_window() -> None:
    a = video(0, frames=1, side=16)
    b = np.clip(a.astype(int) + video(1, frames=1, side=16) // 8, 0, 255).astype(np.uint8)
    assert metrics.ssim(a, b) == pytest.approx(naive_ssim(a, b), abs=1e-12)
    assert metrics.ssim(a, a) == pytest.approx(1.0, abs=1e-12)


def test_frames_become_8_bit_by_rounding_to_nearest() -> None:
    given = np.array([-0.1, 0.0, 0.499 / 255, 0.501 / 255, 1.0, 2.0]).reshape(1, 1, 6, 1)
    assert metrics.to_8_bit(given).ravel().tolist() == [0, 0, 0, 1, 255, 255]
    with pytest.raises(ValueError, match="NaN or Inf"):
        metrics.to_8_bit(np.array([math.nan]))


def test_wrong_videos_raise_with_every_reason() -> None:
    with pytest.raises(ValueError) as error:
        metrics.psnr(np.zeros((1, 8, 8, 3)), video(0))  # type: ignore[arg-type]
    assert "one shape" in str(error.value) and "float64 and uint8" in str(error.value)
    with pytest.raises(ValueError, match="smaller than the 11 x 11 window"):
        metrics.ssim(video(0, side=8), video(1, side=8))


def test_quality_summary_leaves_equal_videos_out_of_the_mean() -> None:
    a, b = video(0), video(1)
    summary = metrics.summarise_quality([metrics.compare(a, a), metrics.compare(a, b)])
    assert summary is not None
    assert summary["psnr_db_mean"] == summary["psnr_db_min"] == metrics.psnr(a, b)
    assert not summary["identical"]
    equal = metrics.summarise_quality([metrics.compare(a, a)])
    assert equal is not None and equal["identical"] and equal["psnr_db_mean"] is None
    assert metrics.summarise_quality([]) is None


def test_spread_is_median_and_extremes() -> None:
    spread = metrics.Spread.of([3.0, 1.0, 10.0])
    assert (spread.median, spread.min, spread.max, spread.n) == (3.0, 1.0, 10.0, 3)
    with pytest.raises(ValueError, match="no measurements"):
        metrics.Spread.of([])
