"""The page of a suite in a browser: it shows what the files beside it hold."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from liteattention_e2e import busy
from liteattention_e2e import page as pages
from liteattention_e2e.config import Configuration, load_config
from liteattention_e2e.runner import Runner
from liteattention_rocm import LiteAttention, SkipPolicy
from liteattention_rocm.lite import bitmap
from liteattention_rocm.lite.state import State

from .conftest import Opened, luminance, overflow

PROMPTS = [
    "a red circle moves left on a blue background",
    "a cyan diamond moves up on a gray background",
]
SIZES = {
    "height": "32", "width": "32", "frames": "6", "steps": "4", "guidance": "3",
    "dtype": "float32", "geometry": "32x64x16", "threads": "1",
}  # fmt: skip
SLUGS = {
    "diffusers": "diffusers", "dense": "dense", "lite -inf": "lite_-inf", "lite -2": "lite_-2",
    "lite budget 0.05": "lite_budget_0.05",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """A machine that nothing else keeps busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(busy, "signs", lambda *_: [])
        yield


@pytest.fixture(scope="module")
def suite(
    app: typer.Typer, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """A small suite: its JSON and its folder."""
    out = tmp_path_factory.mktemp("page")
    prompts = out / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    outcome = CliRunner().invoke(
        app,
        ["e2e", "--model", str(model), "--prompts", str(prompts), "--threshold", "-inf,-2",
         "--budgets", "0.05", "--warmup", "0", "--check-prompts", *sizes, "--out", str(out)],
    )  # fmt: skip
    assert outcome.exit_code == 0, outcome.output
    return json.loads((out / "report.json").read_text()), out


def figures(report: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in report["configurations"] if item["name"] == name)


def settled(page: Any) -> None:
    """Wait until all videos show the frame that the page says."""
    page.wait_for_function(
        "() => { const all = [...document.querySelectorAll('#screens video')];"
        "return all.length && all.every(v => !v.seeking && v.dataset.frame === "
        "document.getElementById('frame').value); }"
    )


def choose(page: Any, group: str, index: int) -> None:
    page.get_by_role("radio", name=group, exact=True).check()
    page.locator("#point").evaluate(
        "(box, i) => { box.value = i; box.dispatchEvent(new Event('input')); }", index
    )


NAMES = "all => all.map(e => e.dataset.configuration)"
SHOWN = """(index) => {
  const video = document.querySelectorAll('#screens video')[index];
  const canvas = new OffscreenCanvas(32, 32);
  const context = canvas.getContext('2d');
  context.drawImage(video, 0, 0, 32, 32);
  return [...context.getImageData(0, 0, 32, 32).data];
}"""


def frame_shown(page: Any, index: int, frames: np.ndarray) -> int:
    """Which of the stored frames the pixels of a video on the page are nearest to."""
    seen = np.array(page.evaluate(SHOWN, index)).reshape(32, 32, 4)[..., :3]
    weights = np.array([0.299, 0.587, 0.114])
    distances = np.abs((frames.astype(float) - seen) @ weights).mean((1, 2))
    assert np.sort(distances)[1] > 2 * distances.min()  # no other frame is like it
    return int(distances.argmin())


def test_the_videos_of_a_prompt_go_frame_by_frame_together(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    report, out = suite
    page = open_page(out / "report.html")
    page.locator("#case").select_option("1")
    page.get_by_role("radio", name="All settings").check()
    settled(page)
    names = page.locator("#screens figure").evaluate_all(
        "all => all.map(e => e.dataset.configuration)"
    )
    assert names == [item["name"] for item in report["configurations"]] == list(SLUGS)
    with np.load(out / "frames_p1_s0.npz") as stored:
        frames = {name: stored[slug] for name, slug in SLUGS.items()}
    for frame in (0, 3, 5):
        page.locator("#frame").fill(str(frame))
        settled(page)
        assert page.locator("#frame-name").inner_text() == f"{frame + 1} of 6"
        for index, name in enumerate(names):
            assert frame_shown(page, index, frames[name]) == frame
    page.locator("#forth").click()  # it loops
    settled(page)
    assert frame_shown(page, 0, frames["diffusers"]) == 0


def test_playing_videos_stay_in_step_and_begin_again(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    page = open_page(suite[1] / "report.html")
    settled(page)
    page.locator("#play").click()
    seen = page.evaluate(
        """async () => {
          const seen = [];
          const end = performance.now() + 2500;
          while (performance.now() < end) {
            await new Promise(requestAnimationFrame);
            const all = [...document.querySelectorAll('#screens video')];
            if (all.some(v => v.seeking)) continue;
            seen.push(all.map(v => Math.floor(v.currentTime * 8)));
          }
          return seen;
        }"""
    )
    assert all(len(each) == 3 and max(each) - min(each) in (0, 5, 1) for each in seen)
    together = [each[0] for each in seen if len(set(each)) == 1]
    assert len(together) > 0.8 * len(seen)  # else one is on its way to the same frame
    assert set(together) == set(range(6))
    assert any(b < a for a, b in itertools.pairwise(together))  # it began again
    page.locator("#play").click()
    assert page.locator("#play").get_attribute("aria-pressed") == "false"


def test_the_slider_shows_the_figures_of_the_json(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    report, out = suite
    page = open_page(out / "report.html")

    def card(key: str) -> tuple[str, str]:
        found = page.locator(f"[data-figure={key}]")
        return found.locator(".value").inner_text(), found.locator(".more").inner_text()

    dense = figures(report, "dense")
    for group, index, name in (
        ("Threshold", 0, "lite -inf"),
        ("Threshold", 1, "lite -2"),
        ("Budget", 0, "lite budget 0.05"),
    ):
        choose(page, group, index)
        item = figures(report, name)
        quality, seconds = item["quality"]["vs_dense"], item["seconds"]["denoise"]["median"]
        if name == "lite -inf":
            assert card("psnr") == ("equal", "every pixel")
        else:
            worst = f"worst {quality['psnr_db_min']:.1f} dB"
            assert card("psnr") == (f"{quality['psnr_db_mean']:.1f} dB", worst)
        assert card("ssim")[0] == f"{quality['ssim_mean']:.4f}"
        shares = [f"{each['prompts_followed']['all']:.0%}" for each in (item, dense)]
        assert card("followed") == (shares[0], f"dense {shares[1]}")
        sparsity = item["sparsity"]
        last = f"last step {sparsity['last_step']:.1%}"
        assert card("sparsity") == (f"{sparsity['mean']:.1%}", last)
        base = dense["seconds"]["denoise"]["median"]
        assert card("seconds") == (f"{seconds:.2f} s", f"dense {base:.2f} s")
        ratio = item["speedup"]["vs_dense"]["median"]
        assert card("speedup")[0] == f"{ratio:.2f}x"
        shown = page.locator("#screens figure.chosen")
        assert shown.evaluate_all(NAMES) == [name]
        (run,) = (
            run for run in report["runs"] if (run["configuration"], run["prompt"]) == (name, 0)
        )
        distance = run["vs_dense"]
        with np.load(out / "frames_p0_s0.npz") as stored:
            same = np.array_equal(stored[SLUGS[name]], stored["dense"])
        wanted = "equals dense" if same else f"PSNR {distance['psnr_db']:.1f} dB"
        assert wanted in shown.inner_text()
    # a point of the chart is the same choice
    page.locator("circle[data-choose='lite -2']").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("#point-name").inner_text() == "-2"


READ = """() => {
  const canvas = document.getElementById('bitmap-canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const colours = [];
  for (let i = 0; i < data.length; i += 4) {
    colours.push(data[i] * 65536 + data[i + 1] * 256 + data[i + 2]);
  }
  return [canvas.width, canvas.height, colours];
}"""


def ready(page: Any, **wanted: Any) -> None:
    page.wait_for_function(
        "wanted => { const now = JSON.parse(document.getElementById('bitmap-canvas').dataset.ready"
        " ?? '{}'); return Object.entries(wanted).every(([k, v]) => now[k] === v); }",
        arg=wanted,
    )


def test_a_cell_opens_the_stored_tiles_of_its_layer_and_step(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    report, out = suite
    page = open_page(out / "report.html")
    page.locator("#case").select_option("1")
    choose(page, "Threshold", 1)
    records = next(
        run["sparsity"]
        for run in report["runs"]
        if (run["configuration"], run["prompt"]) == ("lite -2", 1)
    )
    with np.load(out / "tiles_p1_s0.npz") as file:
        stored = {name: file[name] for name in file.files}
    tried = 0
    for layer in ("blocks.0.attn1", "blocks.1.attn1"):
        for step in (0, 2, 3):
            here = [r for r in records if (r["layer"], r["step"]) == (layer, step)]
            assert len(here) == 2  # both guidance branches
            share = 1 - sum(r["tiles_computed"] for r in here) / sum(r["tiles_total"] for r in here)
            cell = page.locator(f"#heat td[data-layer='{layer}'][data-step='{step}']")
            said = cell.get_attribute("aria-label")
            assert said == f"{layer}, step {step}: {100 * share:.1f}% skipped"
            cell.click()
            for record in here:
                page.locator("#bitmap-branch").select_option(record["branch"])
                for head in (0, 1):
                    page.locator("#bitmap-heads input").nth(head).check()
                    ready(page, layer=layer, branch=record["branch"], step=step, head=head)
                    width, height, colours = page.evaluate(READ)
                    name = f"lite_-2/{layer}/{record['branch']}"
                    steps = stored[f"{name}/steps"].tolist()
                    bits = stored[f"{name}/bits"][steps.index(step)]
                    count = int(stored[f"{name}/k_blocks"])
                    kept = np.unpackbits(bits, axis=-1, bitorder="little")[0, :, :, :count]
                    assert kept.sum() == record["tiles_computed"]
                    assert (height, width) == kept.shape[1:]
                    drawn = np.array(colours).reshape(height, width)
                    on, off = drawn[kept[head] == 1], drawn[kept[head] == 0]
                    assert len(set(on)) == 1 and len(set(off)) == (1 if len(off) else 0)
                    assert not set(on) & set(off)
                    skipped = f"{100 * (1 - kept[head].mean()):.1f}%"
                    assert skipped in page.locator("#bitmap-status").inner_text()
                    tried += bool(len(off))
            page.keyboard.press("Escape")
    assert tried >= 8  # not only full ones


@pytest.mark.parametrize(
    "policy",
    [
        SkipPolicy(threshold=-1.5, warmup_steps=0),
        SkipPolicy(threshold=-1.5, retest_every=3, warmup_steps=1),
        SkipPolicy(threshold=-1.5, must_skip=[(0, 64)], must_do=[(128, 192)], warmup_steps=0),
        SkipPolicy(budget=0.2, branches="shared", warmup_steps=0),
    ],
    ids=["threshold", "retest", "ranges", "shared budget"],
)
def test_stored_tiles_are_the_lists_that_the_engine_was_given(
    policy: SkipPolicy, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[tuple[str, str, int], torch.Tensor] = {}
    take_turn, run, at = State.take_turn, LiteAttention._run, []

    def watched_run(
        self: Any, state: Any, plan: Any, tensors: Any, options: Any, where: Any
    ) -> Any:
        at[:] = where
        return run(self, state, plan, tensors, options, where)

    def watched_turn(self: Any, tiles: Any, *more: Any) -> Any:
        turn = take_turn(self, tiles, *more)
        _, step, layer, branch = at
        read = turn[0].clone()
        given[layer, branch, step] = read if tiles.must_skip is None else read & ~tiles.must_skip
        return turn

    monkeypatch.setattr(LiteAttention, "_run", watched_run)
    monkeypatch.setattr(State, "take_turn", watched_turn)
    sizes = {"model": str(model), "prompts": PROMPTS[:1], **SIZES, "steps": 6}
    made = Runner(load_config(sizes)).run(Configuration("lite", "lite", policy), 0, 0, 0)
    dense = policy.warmup_steps
    found = 0
    for each in made.tiles:
        assert each.steps == tuple(range(6))
        for i, step in enumerate(each.steps):
            kept = np.unpackbits(each.bits[i], axis=-1, bitorder="little")[..., : each.k_blocks]
            if step < dense:
                assert kept.all()
                continue
            wanted = bitmap.unpack(given[each.layer, each.branch, step], each.k_blocks)
            assert np.array_equal(kept.astype(bool), wanted.numpy())
            found += not kept.all()
    assert len(made.tiles) == 4 and found > 8


def test_lists_that_are_too_many_are_kept_of_some_steps(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"model": str(model), "prompts": PROMPTS[:1], **SIZES, "steps": 6}
    lite = Configuration("lite", "lite", SkipPolicy(threshold=-1.5, warmup_steps=0))
    whole = Runner(load_config(sizes)).run(lite, 0, 0, 0)
    step = sum(8 * 4 * 2 * 16 * 4 // 32 for _ in whole.tiles)
    monkeypatch.setattr("liteattention_e2e.step_tiles.LIMIT", 3 * step)
    some = Runner(load_config(sizes)).run(lite, 0, 0, 0)
    assert some.digest == whole.digest
    for one, other in zip(whole.tiles, some.tiles, strict=True):
        assert 0 in other.steps and 5 in other.steps and len(other.steps) < 6
        assert np.array_equal(other.bits, one.bits[list(other.steps)])


def focused(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(
        "() => { const e = document.activeElement, s = getComputedStyle(e);"
        "return { id: e.id, tag: e.tagName, text: e.innerText ?? '', role: e.getAttribute('role'),"
        "label: e.getAttribute('aria-label') ?? e.labels?.[0]?.innerText ?? '', type: e.type,"
        "ring: parseFloat(s.outlineWidth), style: s.outlineStyle }; }"
    )
    return found


def test_everything_can_be_done_with_a_keyboard(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    page = open_page(suite[1] / "report.html")
    reached = {}
    for _ in range(60):
        page.keyboard.press("Tab")
        now = focused(page)
        if now["tag"] == "BODY":
            break
        if now["role"] not in ("button", "region") and now["type"] not in ("radio", "checkbox"):
            assert now["style"] != "none" and now["ring"] >= 2, now  # it can be seen where one is
        assert now["label"] or now["text"], now  # and it has a name
        reached[now["id"] or now["role"] or now["type"] or now["text"]] = now
    assert {"theme", "case", "point", "play", "back", "forth", "frame", "gridcell"} <= set(reached)
    page.locator("#point").focus()
    before = page.locator("#point-name").inner_text()
    page.keyboard.press("ArrowLeft")
    assert page.locator("#point-name").inner_text() != before
    assert page.locator("#point").get_attribute("aria-valuetext") == "lite -inf"
    page.keyboard.press("ArrowRight")
    page.keyboard.press(".")
    settled(page)
    assert page.locator("#frame").input_value() == "1"
    page.locator("#heat td[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    cell = focused(page)["label"]
    assert cell.startswith("blocks.1.attn1, step 2: ")
    page.keyboard.press("Enter")
    ready(page, layer="blocks.1.attn1", step=2)
    assert page.evaluate("document.getElementById('bitmap').contains(document.activeElement)")
    page.locator("#bitmap-step").focus()
    page.keyboard.press("ArrowRight")
    ready(page, layer="blocks.1.attn1", step=3)
    page.keyboard.press("Escape")
    assert not page.locator("#bitmap").is_visible()
    assert focused(page)["label"] == cell


def test_light_and_dark(suite: tuple[dict[str, Any], Path], open_page: Opened) -> None:
    for scheme, first, then in (("dark", "dark", "light"), ("light", "light", "dark")):
        page = open_page(suite[1] / "report.html", scheme=scheme)

        def is_dark(page: Any = page) -> bool:
            page_light, ink = luminance(page, "backgroundColor"), luminance(page, "color")
            assert abs(page_light - ink) > 0.6  # it can be read
            return page_light < ink

        assert is_dark() == (first == "dark")
        while then not in page.locator("#theme").inner_text():
            page.locator("#theme").click()
        assert is_dark() == (then == "dark")


def test_a_narrow_window_scrolls_down_only(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    page = open_page(suite[1] / "report.html", width=360)
    settled(page)
    assert overflow(page) <= 0
    page.get_by_role("radio", name="All settings").check()
    page.locator("summary").click()
    settled(page)
    assert overflow(page) <= 0
    page.locator("#heat td.opens").last.click()
    ready(page, step=3)
    assert overflow(page) <= 0
    box = page.locator("#bitmap").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


def rendered(
    suite: tuple[dict[str, Any], Path],
    name: str,
    change: Callable[[dict[str, Any]], None],
    limit: int,
) -> Path:
    report = copy.deepcopy(suite[0])
    change(report)
    path = suite[1] / name
    path.write_text(pages.to_html(report, suite[1], SLUGS, pages.Lists(), video_limit=limit))
    return path


def test_many_videos_are_linked_and_the_page_says_so(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    whole = (suite[1] / "report.html").stat().st_size
    path = rendered(suite, "linked.html", lambda _: None, 1000)
    assert path.stat().st_size < 0.6 * whole
    page = open_page(path)
    settled(page)
    text = page.locator("#videos").inner_text()
    assert "10 videos" in text and "1.0 kB that a page holds" in text
    page.locator("#frame").fill("4")
    settled(page)  # as long as they are beside it
    assert page.locator("#screens video").first.get_attribute("src") == "diffusers_p0_s0.mp4"


def test_text_of_users_is_text(suite: tuple[dict[str, Any], Path], open_page: Opened) -> None:
    evil = "</script><script>document.title='x'</script><b>a & \"b\"</b> 'c'"

    def change(report: dict[str, Any]) -> None:
        report["settings"]["prompts"][0] = evil
        report["environment"]["command"] = evil
        report["complete"] = False

    page = open_page(rendered(suite, "evil.html", change, 10**9))
    settled(page)
    assert page.title().startswith("Generation time")
    assert evil in page.locator("#case option").first.inner_text()
    assert page.locator(".facts dd").first.inner_text() == evil
    assert "Incomplete: 10 of 10" in page.locator(".warning").inner_text()


def test_tables_are_sorted_by_their_columns(
    suite: tuple[dict[str, Any], Path], open_page: Opened
) -> None:
    report, out = suite
    page = open_page(out / "report.html")
    head = page.locator("#table-1 thead th", has_text="denoise s")
    seconds = {
        item["name"]: item["seconds"]["denoise"]["median"] for item in report["configurations"]
    }
    names = "all => all.map(row => row.cells[0].innerText)"
    for order, down in (("descending", True), ("ascending", False)):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        found = page.locator("#table-1 tbody tr").evaluate_all(names)
        assert found == sorted(seconds, key=seconds.__getitem__, reverse=down)


def test_three_videos_stand_side_by_side_and_one_setting_has_no_slider(
    suite: tuple[dict[str, Any], Path], open_page: Opened, tmp_path: Path
) -> None:
    """What `generate` makes: diffusers, dense and one setting; and its words are explained."""
    text = (suite[1] / "report.html").read_text()
    start = text.index('id="view">') + len('id="view">')
    end = text.index("</script>", start)
    view = json.loads(text[start:end])
    view["groups"] = [{"label": "Budget", "points": [4]}]
    single = tmp_path / "single.html"
    single.write_text(text[:start] + json.dumps(view).replace("<", "\\u003c") + text[end:])
    page = open_page(single, width=1200)
    settled(page)
    boxes = page.locator("#screens figure").evaluate_all(
        "all => all.map(e => [e.offsetTop, e.offsetWidth])"
    )
    assert len(boxes) == 3 and len({top for top, _ in boxes}) == 1
    assert min(width for _, width in boxes) > 300
    assert not page.locator("#point").is_visible()
    assert page.locator("#point-name").inner_text() == "0.05"
    words = page.locator("#words").inner_text()
    for word in ("diffusers", "dense", "LiteAttention", "PSNR", "skipped"):
        assert word in words
    narrow = open_page(single, width=360)
    assert overflow(narrow) <= 0
