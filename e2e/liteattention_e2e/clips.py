"""Procedural clips of moving shapes, with the sentence that describes each.

A clip holds one or two anti-aliased shapes on a plain background; every shape moves in a straight
line at constant speed and never leaves the frame. The sentence names, for every object, colour,
shape and direction, and the background:

    a red circle moves left on a blue background
    a red circle moves left and a green square moves up on a gray background

Everything is plain vectorised PyTorch, so that clips are made on the training GPU faster than the
model uses them up. The same seed on the same kind of device gives the same clips.

Held-out split: one in eight of the (colour, shape, direction, background) combinations never occurs
in a training clip, neither alone nor as one object of a pair (see `held_out_table`).
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

import torch

Rgb = tuple[int, int, int]

SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "diamond")
COLOURS: dict[str, Rgb] = {
    "red": (220, 30, 35),
    "green": (35, 165, 60),
    "blue": (35, 70, 215),
    "yellow": (245, 225, 50),
    "purple": (150, 45, 180),
    "cyan": (50, 205, 220),
    "orange": (245, 125, 20),
}
BACKGROUNDS: dict[str, Rgb] = {
    "black": (15, 15, 15),
    "white": (240, 240, 240),
    "gray": (128, 128, 128),
    "blue": COLOURS["blue"],
    "pink": (245, 160, 195),
}
DIRECTIONS: dict[str, tuple[int, int]] = {  # (x, y) in the image; y grows downwards
    "left": (-1, 0),
    "right": (1, 0),
    "up": (0, -1),
    "down": (0, 1),
}
HELD_OUT_ONE_IN = 8

_COLOUR_NAMES = tuple(COLOURS)
_BACKGROUND_NAMES = tuple(BACKGROUNDS)
_DIRECTION_NAMES = tuple(DIRECTIONS)
# Nothing that is drawn reaches farther from its centre than this many radii (corner of a square).
_REACH = 1.15
_CANDIDATES = 16  # starts drawn per clip of two objects; the first without a collision is taken


@dataclass(frozen=True)
class ObjectSpec:
    """One moving object, by names out of `COLOURS`, `SHAPES` and `DIRECTIONS`."""

    colour: str
    shape: str
    direction: str

    def phrase(self) -> str:
        """'an orange square moves up'."""
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape} moves {self.direction}"


@dataclass(frozen=True)
class Scene:
    """What a prompt asks for: a background (a name in `BACKGROUNDS`) and one or two objects."""

    background: str
    objects: tuple[ObjectSpec, ...]

    def __post_init__(self) -> None:
        reasons = []
        if self.background not in BACKGROUNDS:
            reasons.append(f"background {self.background!r} is none of {_BACKGROUND_NAMES}")
        if len(self.objects) not in (1, 2):
            reasons.append(f"{len(self.objects)} objects given, 1 or 2 are possible")
        for item in self.objects:
            if item.colour not in COLOURS:
                reasons.append(f"colour {item.colour!r} is none of {_COLOUR_NAMES}")
            if item.shape not in SHAPES:
                reasons.append(f"shape {item.shape!r} is none of {SHAPES}")
            if item.direction not in DIRECTIONS:
                reasons.append(f"direction {item.direction!r} is none of {_DIRECTION_NAMES}")
            if item.colour == self.background:
                reasons.append(f"a {item.colour} object cannot be seen on {self.background}")
        if len({item.colour for item in self.objects}) < len(self.objects):
            reasons.append("both objects have one colour: give them two")
        if reasons:
            raise ValueError("not a scene: " + "; ".join(reasons))

    @property
    def prompt(self) -> str:
        """The sentence of the fixed grammar that describes the scene."""
        what = " and ".join(item.phrase() for item in self.objects)
        return f"{what} on a {self.background} background"

    @property
    def held_out(self) -> bool:
        """True if at least one object's combination is kept out of training."""
        table = held_out_table()
        background = _BACKGROUND_NAMES.index(self.background)
        return any(bool(table[background][_object_index(item)]) for item in self.objects)


def parse_prompt(prompt: str) -> Scene:
    """The scene a sentence of the grammar describes (case and final full stop do not matter).

    Raises:
        ValueError: the sentence is not of the grammar; the message shows an example.
    """
    words = prompt.lower().strip().rstrip(".").split()
    example = "a red circle moves left and a green square moves up on a gray background"
    objects: list[ObjectSpec] = []
    rest = words
    while len(rest) >= 5 and rest[0] in ("a", "an") and rest[3] == "moves":
        objects.append(ObjectSpec(colour=rest[1], shape=rest[2], direction=rest[4]))
        rest = rest[5:]
        if rest[:1] != ["and"]:
            break
        rest = rest[1:]
    if not objects or len(rest) != 4 or rest[:2] != ["on", "a"] or rest[3] != "background":
        raise ValueError(f"{prompt!r} is not of the form {example!r}")
    return Scene(background=rest[2], objects=tuple(objects))


def vocabulary() -> tuple[str, ...]:
    """All words of the grammar, in a fixed order."""
    words: dict[str, None] = dict.fromkeys(("a", "an", "moves", "and", "on", "background"))
    for group in (_COLOUR_NAMES, SHAPES, _DIRECTION_NAMES, _BACKGROUND_NAMES):
        words.update(dict.fromkeys(group))
    return tuple(words)


def _object_index(item: ObjectSpec) -> int:
    colour = _COLOUR_NAMES.index(item.colour)
    shape = SHAPES.index(item.shape)
    direction = _DIRECTION_NAMES.index(item.direction)
    return (colour * len(SHAPES) + shape) * len(DIRECTIONS) + direction


def _object_from_index(index: int) -> ObjectSpec:
    index, direction = divmod(index, len(DIRECTIONS))
    colour, shape = divmod(index, len(SHAPES))
    return ObjectSpec(_COLOUR_NAMES[colour], SHAPES[shape], _DIRECTION_NAMES[direction])


@functools.cache
def possible_table() -> torch.Tensor:
    """bool [backgrounds, objects]: the object can be seen on the background (CPU)."""
    count = len(COLOURS) * len(SHAPES) * len(DIRECTIONS)
    table = torch.zeros(len(BACKGROUNDS), count, dtype=torch.bool)
    for row, background in enumerate(_BACKGROUND_NAMES):
        for column in range(count):
            table[row, column] = _object_from_index(column).colour != background
    return table


@functools.cache
def held_out_table() -> torch.Tensor:
    """bool [backgrounds, objects]: combination that no training clip shows (CPU).

    One in `HELD_OUT_ONE_IN` of the possible combinations, shuffled with a fixed seed; every single
    attribute value and every pair of values still occurs in training many times.
    """
    possible = possible_table()
    cells = [(int(row), int(column)) for row, column in possible.nonzero()]
    random.Random(20251).shuffle(cells)
    table = torch.zeros_like(possible)
    for row, column in cells[: len(cells) // HELD_OUT_ONE_IN]:
        table[row, column] = True
    return table


def held_out_scenes(count: int, *, two_objects: float = 0.5, seed: int = 0) -> list[Scene]:
    """`count` different scenes whose objects are all held-out combinations, the same every time.

    Args:
        count: number of scenes.
        two_objects: share of scenes with two objects (rounded down; they come last).
        seed: of the choice.

    Raises:
        ValueError: more one-object scenes are asked for than there are held-out combinations.
    """
    rng = random.Random(seed)
    table = held_out_table()
    cells = [(int(row), int(column)) for row, column in table.nonzero()]
    pairs = int(count * two_objects)
    if count - pairs > len(cells):
        raise ValueError(
            f"{count - pairs} one-object scenes asked for, only {len(cells)} combinations are held "
            "out: lower count or raise two_objects"
        )
    rng.shuffle(cells)
    scenes = [
        Scene(_BACKGROUND_NAMES[row], (_object_from_index(column),))
        for row, column in cells[: count - pairs]
    ]
    seen: set[Scene] = set()
    while len(seen) < pairs:
        row, first = rng.choice(cells)
        second = rng.choice([column for other, column in cells if other == row])
        one, two = _object_from_index(first), _object_from_index(second)
        if one.colour == two.colour:
            continue
        scene = Scene(_BACKGROUND_NAMES[row], (one, two))
        if scene not in seen:
            seen.add(scene)
            scenes.append(scene)
    return scenes


@dataclass(frozen=True)
class SceneBatch:
    """Scenes as integer tensors on one device, so that a GPU can draw and describe them.

    Attributes:
        background: int64 [batch], index into `BACKGROUNDS`.
        objects: int64 [batch, 2], index over (colour, shape, direction), colour slowest; -1: none.
    """

    background: torch.Tensor
    objects: torch.Tensor

    def __len__(self) -> int:
        return int(self.background.shape[0])

    @staticmethod
    def from_scenes(scenes: list[Scene], device: torch.device | str = "cpu") -> SceneBatch:
        """The tensors of a list of scenes."""
        background = [_BACKGROUND_NAMES.index(scene.background) for scene in scenes]
        objects = [([_object_index(item) for item in scene.objects] + [-1])[:2] for scene in scenes]
        return SceneBatch(
            torch.tensor(background, device=device), torch.tensor(objects, device=device)
        )

    def scenes(self) -> list[Scene]:
        """The scenes behind the tensors."""
        return [
            Scene(_BACKGROUND_NAMES[row], tuple(_object_from_index(i) for i in pair if i >= 0))
            for row, pair in zip(self.background.tolist(), self.objects.tolist(), strict=True)
        ]


def sample_scenes(
    batch: int, generator: torch.Generator, *, split: str = "train", two_objects: float = 0.5
) -> SceneBatch:
    """Random scenes of one split, on the generator's device.

    Args:
        batch: how many.
        generator: the source of randomness; its device is the device of the result.
        split: "train" (no held-out combination), "held_out" (only those) or "all".
        two_objects: share of scenes with two objects.
    """
    if split not in ("train", "held_out", "all"):
        raise ValueError(f"split is {split!r}: give 'train', 'held_out' or 'all'")
    device = generator.device
    table = possible_table()
    if split != "all":
        table = table & (held_out_table() if split == "held_out" else ~held_out_table())
    weights = table.to(device=device, dtype=torch.float32)
    columns = weights.shape[1]
    cell = torch.multinomial(weights.flatten(), batch, replacement=True, generator=generator)
    background, first = cell // columns, cell % columns
    per_colour = len(SHAPES) * len(DIRECTIONS)
    colour = torch.arange(columns, device=device) // per_colour
    row = weights[background] * (colour[None] != (first // per_colour)[:, None])
    # A held-out background row may hold one colour only: such a scene stays a one-object scene.
    possible = row.sum(1) > 0
    row = torch.where(possible[:, None], row, torch.ones_like(row))
    second = torch.multinomial(row, 1, generator=generator)[:, 0]
    pair = torch.rand(batch, generator=generator, device=device) < two_objects
    second = torch.where(pair & possible, second, torch.full_like(second, -1))
    return SceneBatch(background, torch.stack([first, second], dim=1))


def _palette(table: dict[str, Rgb], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(table.values()), device=device, dtype=torch.float32) / 127.5 - 1.0


def _trajectories(
    scenes: SceneBatch, frames: int, height: int, width: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Centres [batch, 2, frames, 2] as (x, y) in pixels and radii [batch, 2] in pixels."""
    device = generator.device
    batch = len(scenes)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator, device=device)

    pair = scenes.objects[:, 1] >= 0
    radius = uniform(0.0, 1.0, batch, 2)
    radius = torch.where(pair[:, None], 0.10 + 0.04 * radius, 0.11 + 0.06 * radius)
    radius = radius * min(height, width)
    side = torch.tensor([width, height], device=device, dtype=torch.float32)
    vectors = torch.tensor(list(DIRECTIONS.values()), device=device, dtype=torch.float32)
    step = vectors[scenes.objects.clamp(min=0) % len(DIRECTIONS)]  # [batch, 2, 2]
    reach = (radius * _REACH)[:, None, :, None]
    # The whole clip covers most of the way that is free, whatever the number of frames, so that
    # the direction decides where in the frame an object is at which time. With short ways (30 to
    # 55 % of the side) a model learned everything else first and never the direction.
    share = uniform(0.75, 1.0, batch, _CANDIDATES, 2, 1)
    travel = share * (side - 2 * reach) * step[:, None]
    low = reach + (-travel).clamp(min=0.0)
    high = side - reach - travel.clamp(min=0.0)
    start = low + (high - low) * torch.rand(
        batch, _CANDIDATES, 2, 2, generator=generator, device=device
    )
    time = (
        torch.linspace(0.0, 1.0, frames, device=device) if frames > 1 else side.new_full((1,), 0.5)
    )
    centre = start[:, :, :, None] + travel[:, :, :, None] * time[:, None]
    gap = (centre[:, :, 0] - centre[:, :, 1]).norm(dim=-1).amin(-1)  # [batch, candidates]
    gap = gap - (radius.sum(1) * _REACH)[:, None]
    # First candidate without a collision; if there is none, the one with the largest distance.
    order = torch.arange(_CANDIDATES, 0, -1, device=device)
    score = torch.where(gap > 0, order + height + width, gap)
    choice = torch.where(pair, score.argmax(1), torch.zeros_like(pair, dtype=torch.int64))
    return centre[torch.arange(batch, device=device), choice], radius


def _signed_distance(
    shape: torch.Tensor, dx: torch.Tensor, dy: torch.Tensor, radius: torch.Tensor
) -> torch.Tensor:
    """Distance in pixels to the outline (negative inside) of shape [..., 1, 1, 1] at (dx, dy)."""
    ax, ay = dx.abs(), dy.abs()
    circle = torch.sqrt(dx * dx + dy * dy) - radius
    square = torch.maximum(ax, ay) - 0.81 * radius
    diamond = (ax + ay - 1.12 * radius) * math.sqrt(0.5)
    # Equilateral, one corner up, circumradius 1.15 r, hence inradius half of that.
    inradius = 0.575 * radius
    triangle = torch.maximum(dy - inradius, ax * (math.sqrt(3) / 2) - dy * 0.5 - inradius)
    out = torch.where(shape == SHAPES.index("circle"), circle, square)
    out = torch.where(shape == SHAPES.index("triangle"), triangle, out)
    return torch.where(shape == SHAPES.index("diamond"), diamond, out)


def render(
    scenes: SceneBatch, *, frames: int, height: int, width: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw a clip of each scene, with random sizes, speeds and starting points.

    Args:
        scenes: on the generator's device.
        frames: number of frames, >= 1.
        height, width: in pixels, >= 16.
        generator: the source of randomness.

    Returns:
        float32 [batch, 3, frames, height, width], RGB in [-1, 1].
    """
    reasons = []
    if frames < 1:
        reasons.append(f"frames is {frames}, at least 1 is needed")
    if height < 16 or width < 16:
        reasons.append(f"{height}x{width} pixels are asked for, at least 16x16 are needed")
    if scenes.background.device.type != generator.device.type:
        reasons.append(f"scenes are on {scenes.background.device}, generator on {generator.device}")
    if reasons:
        raise ValueError("; ".join(reasons))
    device = generator.device
    centre, radius = _trajectories(scenes, frames, height, width, generator)
    x = torch.arange(width, device=device, dtype=torch.float32) + 0.5
    y = torch.arange(height, device=device, dtype=torch.float32) + 0.5
    per_colour = len(SHAPES) * len(DIRECTIONS)
    video = _palette(BACKGROUNDS, device)[scenes.background][:, :, None, None, None]
    video = video.expand(-1, -1, frames, height, width)
    for slot in range(2):
        index = scenes.objects[:, slot]
        shape = (index.clamp(min=0) // len(DIRECTIONS) % len(SHAPES)).view(-1, 1, 1, 1)
        dx = x - centre[:, slot, :, 0, None, None]
        dy = y[:, None] - centre[:, slot, :, 1, None, None]
        distance = _signed_distance(shape, dx, dy, radius[:, slot].view(-1, 1, 1, 1))
        # Coverage of a pixel by a straight edge at that distance: exact along the axes.
        alpha = (0.5 - distance).clamp(0.0, 1.0) * (index >= 0).view(-1, 1, 1, 1)
        colour = _palette(COLOURS, device)[index.clamp(min=0) // per_colour]
        video = video + alpha[:, None] * (colour[:, :, None, None, None] - video)
    return video.contiguous()


class PromptEncoder:
    """Word ids of scenes' sentences without going through text, for the training loop.

    Key: none; owner: the training loop; lifetime: one run. Ids come from a mapping word -> id that
    must hold every word of `vocabulary()` and `end`.
    """

    def __init__(
        self, ids: dict[str, int], *, pad: int, end: int, device: torch.device | str
    ) -> None:
        missing = [word for word in vocabulary() if word not in ids]
        if missing:
            raise ValueError(f"the tokenizer lacks the words {missing}")
        self.pad, self.end = pad, end
        phrases = [
            [ids[word] for word in _object_from_index(index).phrase().split()]
            for index in range(possible_table().shape[1])
        ]
        self._phrases = torch.tensor(phrases, device=device)
        tails = [
            [ids[word] for word in f"on a {name} background".split()] + [end]
            for name in _BACKGROUND_NAMES
        ]
        self._tails = torch.tensor(tails, device=device)
        self._and = ids["and"]

    @property
    def length(self) -> int:
        """Tokens of the longest sentence, end mark included."""
        return 2 * int(self._phrases.shape[1]) + 1 + int(self._tails.shape[1])

    def __call__(self, scenes: SceneBatch, drop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask, int64 [batch, length]; rows of bool `drop` [batch] get the empty text."""
        batch = len(scenes)
        first = self._phrases[scenes.objects[:, 0]]
        second = self._phrases[scenes.objects[:, 1].clamp(min=0)]
        tail = self._tails[scenes.background]
        joint = tail.new_full((batch, 1), self._and)
        fill = tail.new_full((batch, self.length - first.shape[1] - tail.shape[1]), self.pad)
        one = torch.cat([first, tail, fill], dim=1)
        two = torch.cat([first, joint, second, tail], dim=1)
        tokens = torch.where((scenes.objects[:, 1] >= 0)[:, None], two, one)
        empty = torch.full_like(tokens, self.pad)
        empty[:, 0] = self.end
        tokens = torch.where(drop[:, None], empty, tokens)
        return tokens, (tokens != self.pad).long()
