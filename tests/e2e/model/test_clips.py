"""The clip generator: same seed same clip, split kept, sentence and picture belong together."""

from __future__ import annotations

import pytest
import torch

from liteattention_e2e import clips
from liteattention_e2e.checker import ATTRIBUTES, check, compare, describe
from tests import ROOT

SIZES = [(64, 64, 8), (96, 96, 8), (128, 128, 8), (64, 64, 16), (96, 160, 5)]


def _clips(
    count: int, size: tuple[int, int, int], seed: int
) -> tuple[clips.SceneBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scenes = clips.sample_scenes(count, generator, split="all")
    height, width, frames = size
    return scenes, clips.render(
        scenes, frames=frames, height=height, width=width, generator=generator
    )


def test_same_seed_gives_the_same_clip_and_another_seed_another() -> None:
    scenes, video = _clips(8, (64, 64, 8), 3)
    again, same = _clips(8, (64, 64, 8), 3)
    assert again.scenes() == scenes.scenes()
    assert torch.equal(video, same)
    assert not torch.equal(video, _clips(8, (64, 64, 8), 4)[1])
    assert video.shape == (8, 3, 8, 64, 64) and video.dtype == torch.float32
    assert float(video.min()) >= -1 and float(video.max()) <= 1


def test_training_never_draws_a_held_out_combination() -> None:
    generator = torch.Generator().manual_seed(0)
    train = clips.sample_scenes(20_000, generator).scenes()
    held_out = clips.sample_scenes(2_000, generator, split="held_out").scenes()
    assert not any(scene.held_out for scene in train)
    assert all(scene.held_out for scene in held_out)
    assert not {scene.prompt for scene in train} & {scene.prompt for scene in held_out}
    assert 0.4 < sum(len(scene.objects) == 2 for scene in train) / len(train) < 0.6
    # Every word still occurs in training.
    seen = {word for scene in train for word in scene.prompt.split()}
    assert seen == set(clips.vocabulary())


def test_held_out_prompts_are_fixed_and_of_both_kinds() -> None:
    scenes = clips.held_out_scenes(64)
    assert scenes == clips.held_out_scenes(64)
    assert len({scene.prompt for scene in scenes}) == 64
    assert sum(len(scene.objects) == 2 for scene in scenes) == 32
    assert all(scene.held_out for scene in scenes)


def test_sentence_round_trip_and_refusals() -> None:
    scenes = clips.held_out_scenes(64)
    assert [clips.parse_prompt(scene.prompt) for scene in scenes] == scenes
    assert clips.parse_prompt("An orange circle moves UP on a blue background.").objects == (
        clips.ObjectSpec("orange", "circle", "up"),
    )
    for wrong in ("a dog runs", "a red circle moves left", "a red circle moves left and on a gray"):
        with pytest.raises(ValueError, match="not of the form"):
            clips.parse_prompt(wrong)
    with pytest.raises(ValueError, match=r"mauve.*sideways"):
        clips.parse_prompt("a mauve circle moves sideways on a gray background")
    with pytest.raises(ValueError, match="cannot be seen"):
        clips.parse_prompt("a blue circle moves left on a blue background")


def test_refuses_every_wrong_argument_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    scenes = clips.sample_scenes(1, generator)
    with pytest.raises(ValueError, match=r"frames.*pixels"):
        clips.render(scenes, frames=0, height=8, width=64, generator=generator)
    with pytest.raises(ValueError, match="split"):
        clips.sample_scenes(1, generator, split="test")


@pytest.mark.parametrize("size", SIZES)
def test_checker_agrees_with_clean_clips(size: tuple[int, int, int]) -> None:
    scenes, video = _clips(60, size, sum(size))
    right = dict.fromkeys(ATTRIBUTES, 0)
    for clip, scene in zip(video, scenes.scenes(), strict=True):
        agreement = check(clip, scene)
        for name in ATTRIBUTES:
            right[name] += getattr(agreement, name)
    assert all(count == 60 for count in right.values()), right


def test_checker_rejects_wrong_prompts() -> None:
    scenes, video = _clips(40, (64, 64, 8), 11)
    items = scenes.scenes()
    for clip, scene in zip(video, items, strict=True):
        seen = describe(clip)
        first, rest = scene.objects[0], scene.objects[1:]
        used = {item.colour for item in scene.objects} | {scene.background}
        other = next(name for name in clips.COLOURS if name not in used)
        ground = next(name for name in clips.BACKGROUNDS if name not in used)
        shape = next(name for name in clips.SHAPES if name != first.shape)
        assert not compare(seen, clips.Scene(ground, scene.objects)).background
        recoloured = clips.ObjectSpec(other, first.shape, first.direction)
        assert not compare(seen, clips.Scene(scene.background, (recoloured, *rest))).colour
        reshaped = clips.ObjectSpec(first.colour, shape, first.direction)
        assert not compare(seen, clips.Scene(scene.background, (reshaped, *rest))).shape
        for direction in set(clips.DIRECTIONS) - {first.direction}:
            turned = clips.ObjectSpec(first.colour, first.shape, direction)
            assert not compare(seen, clips.Scene(scene.background, (turned, *rest))).direction


def test_checker_wants_exactly_the_objects_of_the_prompt() -> None:
    pair = clips.parse_prompt(
        "a red circle moves left and a green square moves up on a gray background"
    )
    single = clips.Scene("gray", pair.objects[:1])
    generator = torch.Generator().manual_seed(0)

    def draw(scene: clips.Scene) -> torch.Tensor:
        batch = clips.SceneBatch.from_scenes([scene])
        return clips.render(batch, frames=8, height=64, width=64, generator=generator)[0]

    assert not check(draw(pair), single).colour
    assert not check(draw(single), pair).colour
    assert check(draw(pair), pair).colour


def test_checker_sees_reversed_still_and_wrapping_motion() -> None:
    scene = clips.parse_prompt("a red square moves left on a gray background")
    batch = clips.SceneBatch.from_scenes([scene])
    generator = torch.Generator().manual_seed(0)
    video = clips.render(batch, frames=8, height=64, width=64, generator=generator)[0]
    assert describe(video.flip(1)).objects[0].direction == "right"
    assert describe(video.transpose(2, 3)).objects[0].direction == "up"
    still = video[:, :1].expand(-1, 8, -1, -1)
    assert describe(still).objects[0].direction == "unclear"
    for shift in range(0, 64, 8):  # somewhere the object leaves at one side and returns
        moved = torch.roll(video, shift, dims=3)
        assert describe(moved).objects[0].direction == "left"


def test_checker_finds_nothing_in_noise_or_an_empty_frame() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(3, 8, 64, 64, generator=generator) * 2 - 1
    assert describe(noise).objects == ()
    empty = describe(torch.zeros(3, 8, 64, 64))
    assert empty.background == "gray" and empty.objects == ()
    with pytest.raises(ValueError, match=r"is needed.*NaN"):
        describe(torch.full((1, 8, 64, 64), float("nan")))


def test_word_ids_equal_the_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    folder = ROOT / "e2e" / "model" / "wan-shapes" / "tokenizer"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    encode = clips.PromptEncoder(
        tokenizer.get_vocab(), pad=tokenizer.pad_token_id, end=tokenizer.eos_token_id, device="cpu"
    )
    scenes = clips.sample_scenes(200, torch.Generator().manual_seed(1), split="all")
    drop = torch.arange(200) % 10 == 0
    ids, mask = encode(scenes, drop)
    prompts = ["" if lost else s.prompt for s, lost in zip(scenes.scenes(), drop, strict=True)]
    wanted = tokenizer(prompts, padding="max_length", max_length=encode.length, return_tensors="pt")
    assert torch.equal(ids, wanted.input_ids) and torch.equal(mask, wanted.attention_mask)
    assert tokenizer.unk_token_id not in ids
