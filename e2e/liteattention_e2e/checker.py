"""What does a clip show? Background, colours, shapes and directions, read off the pixels alone.

Used to measure a text-to-video model trained on `clips`: a generated clip is described without
looking at its prompt, then the description is compared with the prompt.

Method: every pixel takes the nearest colour of the palette of `clips` (Euclidean in RGB). The most
frequent one over the whole clip is the background. Of each remaining colour only the pixels are
kept whose 3x3 neighbourhood has that colour too, which removes the mixed colours of anti-aliased
edges; a colour that keeps at least `MIN_AREA` of the frame in at least half of the frames is an
object. Its direction is the slope of its centroid (a circular mean, so that an object that leaves
on one side and returns on the other is followed); its shape is judged by the third and fourth
moments of the pixels it covers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from liteattention_e2e.clips import BACKGROUNDS, COLOURS, Scene

MIN_AREA = 0.003  # share of the frame; after thinning `clips` never go below 0.006
MIN_TRAVEL = 0.10  # share of the side that an object must cover over the clip; clips: >= 0.30
DOMINANCE = 2.0  # a direction is clear if the movement along it is this much larger than across

ATTRIBUTES = ("background", "colour", "direction", "shape")
PALETTE: dict[str, tuple[int, int, int]] = {**BACKGROUNDS, **COLOURS}


@dataclass(frozen=True)
class SeenObject:
    """One object found in a clip.

    Attributes:
        colour: a name of the palette.
        direction: "left", "right", "up", "down" or "unclear".
        shape: a name in `clips.SHAPES`.
        area: mean share of the frame, in (0, 1).
        travel: (x, y) covered over the whole clip, in shares of width and height; y downwards.
    """

    colour: str
    direction: str
    shape: str
    area: float
    travel: tuple[float, float]


@dataclass(frozen=True)
class Description:
    """What was found in one clip; objects from large to small."""

    background: str
    objects: tuple[SeenObject, ...]


@dataclass(frozen=True)
class Agreement:
    """Which attributes of a prompt a clip shows. All objects must be right for True."""

    background: bool
    colour: bool
    direction: bool
    shape: bool


def _slope(values: torch.Tensor, times: torch.Tensor) -> float:
    times = times - times.mean()
    return float((times * (values - values.mean())).sum() / (times * times).sum().clamp(min=1e-9))


def _centres(weight: torch.Tensor) -> torch.Tensor:
    """Unwrapped circular mean of float64 weight [frames, n] along n, in shares of the side."""
    n = weight.shape[1]
    angle = (torch.arange(n, dtype=torch.float64) + 0.5) * (2 * math.pi / n)
    mean = torch.atan2((weight * angle.sin()).sum(1), (weight * angle.cos()).sum(1)) / (2 * math.pi)
    delta = mean[1:] - mean[:-1]
    delta = delta - delta.round()
    return torch.cat([mean[:1], mean[:1] + delta.cumsum(0)])


def _direction(x: float, y: float) -> str:
    if max(abs(x), abs(y)) < MIN_TRAVEL:
        return "unclear"
    if abs(x) >= DOMINANCE * abs(y):
        return "right" if x > 0 else "left"
    if abs(y) >= DOMINANCE * abs(x):
        return "down" if y > 0 else "up"
    return "unclear"


def _grow(mask: torch.Tensor) -> torch.Tensor:
    """3x3 maximum of float [frames, 1, height, width] -> [frames, height, width]."""
    return torch.nn.functional.max_pool2d(mask, 3, stride=1, padding=1)[:, 0]


def _shape(cover: torch.Tensor) -> str:
    """Vote over the frames of a soft mask, float64 [frames, height, width] in [0, 1].

    Judged by standardised moments, which neither size nor place changes: the third along y is 0.57
    for the triangle and 0 for the others, the fourth (mean of x and y) is 1.8 for the square, 2.0
    for the circle and 2.4 for the diamond. Objects cut by the frame's edge come out wrong.
    """
    votes: dict[str, int] = {}
    for frame in cover:
        total = float(frame.sum())
        if total <= 0.0:
            continue
        skew, fourth = 0.0, 0.0
        for dimension in (0, 1):
            profile = frame.sum(1 - dimension) / total
            place = torch.arange(len(profile), dtype=torch.float64)
            place = place - (profile * place).sum()
            variance = float((profile * place**2).sum())
            fourth += 0.5 * float((profile * place**4).sum()) / variance**2
            if dimension == 0:
                skew = float((profile * place**3).sum()) / variance**1.5
        if abs(skew) > 0.3:
            name = "triangle" if skew < 0 else "unclear"
        elif fourth < 1.91:
            name = "square"
        else:
            name = "circle" if fourth < 2.2 else "diamond"
        votes[name] = votes.get(name, 0) + 1
    return max(votes, key=lambda name: votes[name]) if votes else "unclear"


def describe(video: torch.Tensor) -> Description:
    """Read one clip.

    Args:
        video: float [3, frames, height, width], RGB in [-1, 1] (values outside are clipped); at
            least 2 frames of at least 16x16 pixels.

    Raises:
        ValueError: another shape, or values that are not finite.
    """
    reasons = []
    if video.ndim != 4 or video.shape[0] != 3:
        reasons.append(f"the clip is {tuple(video.shape)}, [3, frames, height, width] is needed")
    elif video.shape[1] < 2 or min(video.shape[2:]) < 16:
        reasons.append(f"the clip is {tuple(video.shape)}: 2 frames of 16x16 are the least")
    if not bool(torch.isfinite(video).all()):
        reasons.append("the clip holds NaN or Inf")
    if reasons:
        raise ValueError("; ".join(reasons))
    rgb = (video.detach().float().cpu().clamp(-1, 1) + 1) * 127.5
    frames, height, width = rgb.shape[1:]
    names = list(PALETTE)
    table = torch.tensor([PALETTE[name] for name in names], dtype=torch.float32)
    # Nearest colour: |p - t|^2 without |p|^2, which is the same for all t.
    distance = table.square().sum(1) - 2.0 * rgb.flatten(1).T @ table.T
    label = distance.argmin(1).view(frames, height, width)
    counts = torch.bincount(label.flatten(), minlength=len(names))
    ground = int(counts.argmax())

    found = []
    for index, name in enumerate(names):
        if index == ground:
            continue
        mask = label == index
        if int(mask.sum()) < MIN_AREA * height * width:
            continue
        outside = (~mask)[:, None].float()
        core = _grow(outside) == 0
        near = _grow(_grow(core[:, None].float())[:, None]) > 0
        area = core.double().mean(dim=(1, 2))
        seen = (area >= MIN_AREA).nonzero()[:, 0]
        if 2 * len(seen) < frames or len(seen) < 2:
            continue
        shown = core[seen].double()
        span = frames - 1
        x = _slope(_centres(shown.sum(1)), seen.double()) * span
        y = _slope(_centres(shown.sum(2)), seen.double()) * span
        # How much of a pixel the object covers, from where its colour lies between the two.
        axis = (table[index] - table[ground])[:, None, None, None]
        share = ((rgb - table[ground][:, None, None, None]) * axis).sum(0) / (axis * axis).sum()
        cover = (share.clamp(0.0, 1.0) * near)[seen].double()
        found.append(
            SeenObject(
                colour=name,
                direction=_direction(x, y),
                shape=_shape(cover),
                area=float(cover.mean()),
                travel=(x, y),
            )
        )
    found.sort(key=lambda item: -item.area)
    return Description(background=names[ground], objects=tuple(found))


def compare(seen: Description, wanted: Scene) -> Agreement:
    """Hold a description against a prompt.

    Colour is right if exactly the colours of the prompt were found, no more and no less. Direction
    (and shape) is right if every object of the prompt was found by its colour and goes its way.
    """
    by_colour = {item.colour: item for item in seen.objects}
    pairs = [(item, by_colour.get(item.colour)) for item in wanted.objects]
    return Agreement(
        background=seen.background == wanted.background,
        colour=set(by_colour) == {item.colour for item in wanted.objects},
        direction=all(hit is not None and hit.direction == item.direction for item, hit in pairs),
        shape=all(hit is not None and hit.shape == item.shape for item, hit in pairs),
    )


def check(video: torch.Tensor, wanted: Scene) -> Agreement:
    """`compare(describe(video), wanted)`; video as in `describe`."""
    return compare(describe(video), wanted)
