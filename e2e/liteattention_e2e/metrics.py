"""How far two videos are apart, and what a handful of timings says.

Quality is measured on 8-bit frames, as they are shown and stored, so that every figure can be
derived again from the files a suite run leaves behind. PSNR of equal frames is infinite; JSON has
no infinity, so it is None there, beside ``identical: true``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

Frames = npt.NDArray[np.uint8]

_WINDOW = 11  # side of the Gaussian window of SSIM: sigma 1.5, cut at 3.5 sigma


def to_8_bit(frames: npt.ArrayLike) -> Frames:
    """Frames in [0, 1], float [F, H, W, C] -> uint8, rounded to nearest.

    Raises:
        ValueError: the frames hold NaN or Inf.
    """
    array = np.asarray(frames)
    if array.dtype == np.uint8:
        return array
    if not np.isfinite(array).all():
        raise ValueError("the frames hold NaN or Inf: the model diverged, nothing to measure")
    eight_bit: Frames = np.rint(np.clip(array, 0.0, 1.0) * 255.0).astype(np.uint8)
    return eight_bit


def psnr(a: Frames, b: Frames) -> float:
    """Peak signal-to-noise ratio in dB over all pixels of uint8 [F, H, W, C]; inf if equal."""
    _same(a, b)
    if np.array_equal(a, b):
        return math.inf
    return float(peak_signal_noise_ratio(a, b, data_range=255))


def ssim(a: Frames, b: Frames) -> float:
    """Structural similarity in [-1, 1], mean over frames and channels of uint8 [F, H, W, C].

    Gaussian window of 11 x 11, sigma 1.5, population variances, borders of 5 pixels left out
    (Wang, Bovik, Sheikh, Simoncelli: Image quality assessment, 2004).

    Raises:
        ValueError: the shapes differ or a frame is smaller than the window.
    """
    _same(a, b)
    if min(a.shape[1:3]) < _WINDOW:
        raise ValueError(f"frames of {a.shape[1:3]} are smaller than the 11 x 11 window of SSIM")
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False}
    return statistics.fmean(
        structural_similarity(x, y, data_range=255, channel_axis=-1, **options)
        for x, y in zip(a, b, strict=True)
    )


def _same(a: Frames, b: Frames) -> None:
    reasons = []
    if a.shape != b.shape or a.ndim != 4:
        reasons.append(f"two videos [F, H, W, C] of one shape are needed, got {a.shape}, {b.shape}")
    if a.dtype != np.uint8 or b.dtype != np.uint8:
        reasons.append(f"8-bit frames are needed, got {a.dtype} and {b.dtype}")
    if reasons:
        raise ValueError("; ".join(reasons))


def compare(a: Frames, b: Frames) -> dict[str, Any]:
    """JSON-friendly distance of two videos: psnr_db (None if equal), ssim, identical."""
    ratio = psnr(a, b)
    return {
        "psnr_db": None if math.isinf(ratio) else ratio,
        "ssim": ssim(a, b),
        "identical": math.isinf(ratio),
    }


def summarise_quality(pairs: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Mean and worst case of several :func:`compare` results; None if there are none.

    Mean PSNR is over the pairs that differ, and None if all are equal.
    """
    if not pairs:
        return None
    ratios = [pair["psnr_db"] for pair in pairs if pair["psnr_db"] is not None]
    similarities = [pair["ssim"] for pair in pairs]
    return {
        "psnr_db_mean": statistics.fmean(ratios) if ratios else None,
        "psnr_db_min": min(ratios) if ratios else None,
        "ssim_mean": statistics.fmean(similarities),
        "ssim_min": min(similarities),
        "identical": not ratios,
        "videos": len(pairs),
    }


@dataclass(frozen=True)
class Spread:
    """Median, extremes and number of some measurements of one quantity."""

    median: float
    min: float
    max: float
    n: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Summarise at least one value."""
        listed = list(values)
        if not listed:
            raise ValueError("no measurements to summarise")
        return Spread(statistics.median(listed), min(listed), max(listed), len(listed))

    def to_json(self) -> dict[str, Any]:
        """As a dict."""
        return asdict(self)
