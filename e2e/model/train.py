"""Train the small text-to-video model of `e2e/model/wan-shapes` on procedurally made clips.

    python e2e/model/train.py --minutes 24 --out runs/wan-shapes

One GPU, no data set, no downloads: clips are drawn on the GPU (`liteattention_e2e.clips`). What is
trained: diffusers' WanTransformer3DModel (13 M parameters, 3 heads of 128) together with a tiny
UMT5 text encoder, by flow matching. The result is a folder that `WanPipeline.from_pretrained`
loads. `--resume DIR` goes on from such a folder.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from evaluate import evaluate_pipeline
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from liteattention_e2e.clips import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    PromptEncoder,
    SceneBatch,
    held_out_scenes,
    render,
    sample_scenes,
    vocabulary,
)
from liteattention_e2e.pixel_vae import PixelUnshuffleVAE

TEXT_LENGTHS = (32, 512)  # short prompts, and the padding WanPipeline uses unless told otherwise
LONG_TEXT_SHARE = 0.05


@dataclass(frozen=True)
class Size:
    """A clip size and how many clips make a batch (about 100,000 to 131,000 tokens)."""

    height: int
    width: int
    frames: int
    batch: int

    @property
    def tokens(self) -> int:
        """Tokens of one clip."""
        return self.frames * (self.height // 4) * (self.width // 4)


TINY = Size(32, 32, 8, 192)
SMALL = Size(64, 64, 8, 64)
MEDIUM = Size(96, 96, 8, 28)
LARGE = Size(128, 128, 8, 16)
LONG = Size(128, 128, 16, 8)
WIDE = Size(96, 160, 8, 17)
# (share of the time, [(size, weight)]). Most of what is learned (words, shapes, directions) does
# not depend on the resolution, so most steps are cheap ones.
CURRICULUM: list[tuple[float, list[tuple[Size, float]]]] = [
    (0.28, [(TINY, 1.0)]),
    (0.30, [(SMALL, 0.85), (TINY, 0.15)]),
    (0.42, [(LARGE, 0.52), (MEDIUM, 0.20), (SMALL, 0.13), (WIDE, 0.08), (LONG, 0.07)]),
]
# Continuing a trained model: all sizes from the start.
CURRICULUM_RESUME: list[tuple[float, list[tuple[Size, float]]]] = [
    (0.35, [(SMALL, 0.55), (TINY, 0.20), (LARGE, 0.25)]),
    (0.65, [(LARGE, 0.55), (MEDIUM, 0.15), (SMALL, 0.18), (WIDE, 0.06), (LONG, 0.06)]),
]
SAMPLER_SHIFT = 6.0


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Muon, K. Jordan 2024), matrices of a shape at once.

    Update size follows "Muon is scalable for LLM training" (arXiv 2502.16982): 0.2 sqrt(max side),
    which has the root mean square of an Adam update, so that learning rates compare.

    State: one momentum tensor per matrix shape, float32 [count, rows, columns]; owner: this object;
    lifetime: the run.
    """

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95
    ) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum})
        self._groups: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2:
                    raise ValueError(f"Muon takes matrices, a parameter has shape {tuple(p.shape)}")
                self._groups.setdefault(tuple(p.shape), []).append(p)
        self._momentum: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of all matrices."""
        lr, momentum = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        for shape, params in self._groups.items():
            grad = torch.stack([p.grad.float() for p in params if p.grad is not None])
            if len(grad) != len(params):
                raise RuntimeError(f"{len(params) - len(grad)} matrices {shape} have no gradient")
            buffer = self._momentum.setdefault(shape, torch.zeros_like(grad))
            buffer.lerp_(grad, 1 - momentum)
            update = orthogonalise(grad.lerp(buffer, momentum))
            scale = 0.2 * math.sqrt(max(shape))
            torch._foreach_add_(params, list(update.float().unbind()), alpha=-lr * scale)


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest-to-orthogonal matrices [n, rows, columns] by quintic Newton-Schulz, in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the grammar; case and punctuation do not matter, unknown words become <unk>."""
    words = ["<pad>", "</s>", "<unk>", *vocabulary()]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), normalizers.Replace(Regex(r"[^a-z ]+"), " ")]
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_max_length=512,
    )  # fmt: skip


def build_pipeline(*, layers: int = 6, heads: int = 3, ffn: int = 1024) -> WanPipeline:
    """The untrained pipeline, float32 on the CPU."""
    tokenizer = build_tokenizer()
    text_dim = 128
    encoder = UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(tokenizer), d_model=text_dim, d_kv=32, d_ff=256, num_layers=3,
            num_heads=4, dropout_rate=0.0, feed_forward_proj="gated-gelu", pad_token_id=0,
            eos_token_id=1, decoder_start_token_id=0, is_encoder_decoder=False, use_cache=False,
        )
    )  # fmt: skip
    vae = PixelUnshuffleVAE()
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=128,
        in_channels=vae.config.z_dim, out_channels=vae.config.z_dim, text_dim=text_dim,
        freq_dim=256, ffn_dim=ffn, num_layers=layers, rope_max_seq_len=256,
    )  # fmt: skip
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SAMPLER_SHIFT,
        num_train_timesteps=1000,
    )  # fmt: skip
    return WanPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=vae, scheduler=scheduler,
        transformer=transformer,
    )  # fmt: skip


def noise_levels(size: Size, generator: torch.Generator) -> torch.Tensor:
    """Noise levels in (0, 1), float32 [size.batch], stratified over the batch.

    Where an object is and which way it goes is decided while it can just be told from the noise: at
    level s an object of n pixels has a signal-to-noise ratio of (1 - s) / s * sqrt(n) times a
    constant. That is around 0.94 at 32x32 and 0.985 at 128x128, where only the first three of 20
    steps are. Half of the levels are drawn for that (uniform, shifted in proportion to sqrt(n)), a
    third as the sampler visits them, the rest logit-normal.
    """
    batch, device = size.batch, generator.device
    u = torch.arange(batch, device=device) + torch.rand(batch, generator=generator, device=device)
    u = (u / batch)[torch.randperm(batch, generator=generator, device=device)]
    normal = torch.sigmoid(torch.special.ndtri(u.clamp(1e-4, 1 - 1e-4)))
    pick = torch.rand(batch, generator=generator, device=device)
    structure = 12.0 * math.sqrt(size.frames * size.height * size.width / (8 * 32 * 32))
    shifts = torch.where(pick < 0.5, structure, SAMPLER_SHIFT)
    shifts = torch.where(pick > 5 / 6, 1.0, shifts)
    u = torch.where(pick > 5 / 6, normal, u).clamp(1e-4, 1 - 1e-4)
    return shifts * u / (1 + (shifts - 1) * u)


def training_scenes(batch: int, generator: torch.Generator, *, two_objects: float) -> SceneBatch:
    """Scenes of the training split in which one pair in 16, not one in 4, moves the same way.

    Pairs that move apart are what has to be learned; the others say nothing about which is which.
    """
    first, other = (sample_scenes(batch, generator, two_objects=two_objects) for _ in range(2))
    ways = first.objects % len(DIRECTIONS)
    again = (first.objects[:, 1] >= 0) & (ways[:, 0] == ways[:, 1])
    return SceneBatch(
        torch.where(again, other.background, first.background),
        torch.where(again[:, None], other.objects, first.objects),
    )


class BindingProbe(torch.nn.Module):
    """Asks every word of an object's phrase for that object's colour, shape, direction and place.

    In "a red circle ... and a green square ..." the picture model has to know which of the two goes
    left. Without this term its text encoder learned the words but not what belongs together: alone
    an object was right in 100 % of held-out prompts, of two objects only 69 % went the right way.
    The place (first or second phrase) lets heads of the cross attention keep the objects apart.

    Owner: the training loop; lifetime: one run; it is not part of the saved model.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sizes = [len(COLOURS), len(SHAPES), len(DIRECTIONS), 2]
        self.head = torch.nn.Linear(width, sum(self.sizes))

    def forward(self, hidden: torch.Tensor, scenes: SceneBatch, drop: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats; hidden float [batch, words, width], drop bool [batch]."""
        losses, counts = hidden.new_zeros((), dtype=torch.float32), 0
        for slot, begin in enumerate((0, 6)):  # a phrase has five words, "and" stands between
            logits = self.head(hidden[:, begin : begin + 5].float())
            index = scenes.objects[:, slot]
            present = ((index >= 0) & ~drop).float()[:, None]
            index = index.clamp(min=0)
            per_colour = len(SHAPES) * len(DIRECTIONS)
            targets = (
                index // per_colour,
                index // len(DIRECTIONS) % len(SHAPES),
                index % len(DIRECTIONS),
                torch.full_like(index, slot),
            )
            for part, target in zip(logits.split(self.sizes, dim=-1), targets, strict=True):
                entropy = torch.nn.functional.cross_entropy(
                    part.transpose(1, 2), target[:, None].expand(-1, 5), reduction="none"
                )
                losses = losses + (entropy * present).sum() / (5 * present.sum() + 1)
                counts += 1
        return losses / counts


def position_biases(text: UMT5EncoderModel) -> list[torch.nn.Parameter]:
    """The relative position biases of all layers: all that tells the encoder the word order."""
    return [p for name, p in text.named_parameters() if "relative_attention_bias" in name]


def warm_up_text(
    text: UMT5EncoderModel,
    probe: BindingProbe,
    encode: PromptEncoder,
    generator: torch.Generator,
    steps: int,
    *,
    probe_only: bool,
) -> None:
    """Teach the text encoder which words belong together before the pictures start.

    Args:
        text, probe: trained in place, float32.
        encode: makes the word ids.
        generator: its device is that of the models.
        steps: of AdamW with 256 sentences each.
        probe_only: leave the text encoder alone, because a picture model already relies on it.
    """
    # Which word belongs to which is a matter of their distance, and the biases start at 0.09: with
    # everything at 1e-3 the loss stood at 0.40 nats after 1,000 steps, which is knowing the words
    # and guessing what belongs together. Like this it is below 0.01 after 120.
    biases = position_biases(text)
    others = [p for p in text.parameters() if not any(p is bias for bias in biases)]
    groups: list[dict[str, Any]] = [{"params": list(probe.parameters()), "peak": 1e-3}]
    if not probe_only:
        groups += [{"params": others, "peak": 1e-3}, {"params": biases, "peak": 3e-2}]
    params = [p for group in groups for p in group["params"]]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(steps):
        for group in optimiser.param_groups:
            ramp = min(1.0, (step + 1) / 50, (steps - step) / (0.3 * steps))
            group["lr"] = group["peak"] * ramp
        scenes = training_scenes(256, generator, two_objects=0.7)
        drop = torch.zeros(256, dtype=torch.bool, device=generator.device)
        words, mask = encode(scenes, drop)
        with torch.set_grad_enabled(not probe_only):
            hidden = text(words, mask).last_hidden_state
        loss = probe(hidden, scenes, drop)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimiser.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"text {step}: binding {float(loss.detach()):.4f} nats", flush=True)


def save(pipe: WanPipeline, ema: dict[str, torch.nn.Module], out: Path) -> None:
    """Write the averaged weights in bfloat16 as a folder for `WanPipeline.from_pretrained`."""
    parts = {name: copy.deepcopy(module).to(torch.bfloat16) for name, module in ema.items()}
    WanPipeline(
        tokenizer=pipe.tokenizer, vae=pipe.vae, scheduler=copy.deepcopy(pipe.scheduler), **parts
    ).save_pretrained(out, safe_serialization=True, max_shard_size="14MB")  # fmt: skip
    # transformers 5 calls the class otherwise, but knows this name too; version 4 only this one.
    index = json.loads((out / "model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PreTrainedTokenizerFast"]
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")


def main(
    out: Annotated[Path, typer.Option(help="Folder for the pipeline.")],
    minutes: Annotated[float, typer.Option(help="Time to train, compilation included.")] = 20.0,
    resume: Annotated[Path | None, typer.Option(help="Folder of a pipeline to go on from.")] = None,
    compile_blocks: Annotated[bool, typer.Option("--compile/--no-compile")] = True,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    max_steps: Annotated[int, typer.Option(help="Stop after so many steps (0: by time).")] = 0,
    tiny: Annotated[bool, typer.Option(help="32 px, batch 4, 2 layers: a dry run.")] = False,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the block matrices.")] = 4e-3,
    adam_lr: Annotated[float, typer.Option(help="Peak rate of all else.")] = 1e-3,
    text_warmup: Annotated[int, typer.Option(help="Steps on the text encoder alone.")] = 600,
    two_objects: Annotated[float, typer.Option(help="Share of clips with two objects.")] = 0.75,
    final_lr: Annotated[
        float, typer.Option(help="Rates at the end, as a share of the peak.")
    ] = 0.02,
    evaluate: Annotated[bool, typer.Option(help="Evaluate after each phase.")] = True,
    seed: int = 0,
) -> None:
    """Train, save every few minutes and after the last step, evaluate after each phase."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device).manual_seed(seed)
    if resume is None:
        pipe = build_pipeline(layers=2 if tiny else 6, ffn=256 if tiny else 1024)
    else:
        pipe = WanPipeline.from_pretrained(resume, dtype=torch.float32)
    curriculum = CURRICULUM if resume is None else CURRICULUM_RESUME
    if tiny:
        curriculum = [(share, [(Size(32, 32, 4, 4), 1.0)]) for share, _ in curriculum]
    pipe.to(device)
    net, text, vae = pipe.transformer, pipe.text_encoder, pipe.vae
    # Double precision tables would make every rotation a float64 one.
    net.rope.freqs_cos, net.rope.freqs_sin = net.rope.freqs_cos.float(), net.rope.freqs_sin.float()
    ids = pipe.tokenizer.get_vocab()
    encode = PromptEncoder(
        ids, pad=pipe.tokenizer.pad_token_id, end=pipe.tokenizer.eos_token_id, device=device
    )
    probe = BindingProbe(text.config.d_model).to(device)
    if text_warmup:
        probe_only = resume is not None
        warm_up_text(text, probe, encode, generator, text_warmup, probe_only=probe_only)
    trained = torch.nn.ModuleDict({"transformer": net, "text_encoder": text})
    ema = {name: copy.deepcopy(module).eval() for name, module in trained.items()}
    for module in ema.values():
        module.requires_grad_(False)
    trained.train()
    live = list(trained.parameters())
    clipped = [*live, *probe.parameters()]
    average = [p for module in ema.values() for p in module.parameters()]

    matrices, gains, others = [], [], []
    for name, p in trained.named_parameters():
        if name.startswith("transformer.blocks") and p.ndim == 2:
            matrices.append(p)
        elif "norm_q" in name or "norm_k" in name or "relative_attention_bias" in name:
            gains.append(p)
        else:
            others.append(p)
    muon = Muon(matrices, lr=lr)
    others.extend(probe.parameters())
    # Gains and position biases set how peaked attention can get: they need larger steps.
    adam = torch.optim.AdamW(
        [{"params": others, "peak": adam_lr}, {"params": gains, "peak": 3 * adam_lr}],
        lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=device == "cuda",
    )  # fmt: skip
    if compile_blocks:
        torch._dynamo.config.cache_size_limit = 64
        net.compile_repeated_blocks(fullgraph=True)
    count = sum(p.numel() for p in live)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(
        f"{count / 1e6:.2f} M parameters ({sum(p.numel() for p in matrices) / 1e6:.2f} M Muon), "
        f"{gpu}, torch {torch.__version__}, {minutes} minutes, resume={resume}, lr={lr}/{adam_lr}",
        flush=True,
    )

    std = vae.config.latents_std[0]
    start, last_print, last_save = time.time(), time.time(), time.time()
    step = clips = tokens = phase = 0
    sums = torch.zeros(2, 2, device=device)  # [all, noisy] x [loss sum, count]
    bounds = [sum(share for share, _ in curriculum[: i + 1]) for i in range(len(curriculum))]
    evaluation_seconds = 0.0
    history: list[dict[str, Any]] = []
    while True:
        progress = (time.time() - start - evaluation_seconds) / (60 * minutes)
        if max_steps:
            progress = step / max_steps
        if progress >= 1.0:
            break
        if progress > bounds[phase]:
            begun = time.time()
            save(pipe, ema, out)
            score = quick_evaluation(out, curriculum[phase][1][0][0], device) if evaluate else {}
            print(f"end of phase {phase}: {score}", flush=True)
            history.append({"step": step, "clips": clips, **score})
            phase += 1
            evaluation_seconds += time.time() - begun
            continue
        _, sizes = curriculum[phase]
        draw = float(torch.rand(())) * sum(weight for _, weight in sizes)
        size = sizes[-1][0]
        for candidate, weight in sizes:
            if draw < weight:
                size = candidate
                break
            draw -= weight
        factor = min(1.0, (step + 1) / (200 if resume is None else 60)) * min(
            1.0, final_lr + (1 - final_lr) * (1 - progress) / 0.5
        )
        for group in muon.param_groups:
            group["lr"] = lr * factor
        for group in adam.param_groups:
            group["lr"] = group["peak"] * factor

        with torch.no_grad():
            scenes = training_scenes(size.batch, generator, two_objects=two_objects)
            video = render(
                scenes, frames=size.frames, height=size.height, width=size.width,
                generator=generator,
            )  # fmt: skip
            clean = vae.encode(video, return_dict=False)[0].mode() / std
            noise = torch.randn(clean.shape, generator=generator, device=device)
            sigma = noise_levels(size, generator)
            weight = sigma.view(-1, 1, 1, 1, 1)
            noisy = (1 - weight) * clean + weight * noise
            drop = torch.rand(size.batch, generator=generator, device=device) < 0.1
            words, mask = encode(scenes, drop)
        with torch.autocast(device, dtype=torch.bfloat16):
            embedded = text(words, mask).last_hidden_state
            hidden = embedded * mask[..., None]
            length = TEXT_LENGTHS[float(torch.rand(())) < LONG_TEXT_SHARE]
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, length - hidden.shape[1]))
            guess = net(noisy, sigma * 1000, hidden, return_dict=False)[0]
        error = (guess.float() - (noise - clean)).square().mean(dim=(1, 2, 3, 4))
        loss = error.mean() + 0.05 * probe(embedded, scenes, drop)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clipped, 1.0, foreach=device == "cuda")
        muon.step()
        adam.step()
        for p in clipped:
            p.grad = None
        with torch.no_grad():
            decay = min(0.9985, (step + 1) / (step + 10))
            torch._foreach_lerp_(average, live, 1 - decay)
            high = (sigma > 0.95).float()
            sums[0] += torch.stack([error.sum(), torch.ones_like(error).sum()])
            sums[1] += torch.stack([(error * high).sum(), high.sum()])
        step += 1
        clips += size.batch
        tokens += size.batch * size.tokens
        if (step % 50 == 0 and time.time() - last_print > 15) or step in (1, 2, 10, 50):
            mean, noisy_mean = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
            if not math.isfinite(mean):
                raise RuntimeError(f"the loss is {mean} at step {step}")
            sums.zero_()
            last_print = time.time()
            spent = time.time() - start - evaluation_seconds
            print(
                f"step {step} clips {clips} tokens {tokens / 1e6:.0f}M phase {phase} loss "
                f"{mean:.4f} noisy {noisy_mean:.4f} lr x{factor:.3f} {spent:.0f} s",
                flush=True,
            )
        if time.time() - last_save > 180:
            last_save = time.time()
            save(pipe, ema, out)

    seconds = time.time() - start - evaluation_seconds
    save(pipe, ema, out)
    score = quick_evaluation(out, curriculum[-1][1][0][0], device) if evaluate else {}
    summary = {
        "steps": step, "clips": clips, "tokens": tokens, "seconds": round(seconds, 1), "gpu": gpu,
        "torch": torch.__version__, "parameters": count, "resume": str(resume), "final": score,
        "phases": history,
    }  # fmt: skip
    print(json.dumps(summary, indent=1), flush=True)
    (out.parent / f"{out.name}-training.json").write_text(json.dumps(summary, indent=1) + "\n")


def quick_evaluation(model: Path, size: Size, device: str) -> dict[str, float]:
    """Share of 48 held-out prompts for which each attribute is right, at one size."""
    count = 48 if device == "cuda" else 2
    # Loaded, not cast: `.to(bfloat16)` would round the rotary tables as well.
    pipe = WanPipeline.from_pretrained(model, dtype=torch.bfloat16).to(device)
    report = evaluate_pipeline(
        pipe, held_out_scenes(count), height=size.height, width=size.width, frames=size.frames,
        steps=20 if device == "cuda" else 2, guidance=3.0, batch=24, seed=1,
    )  # fmt: skip
    pairs = report["two_objects"]
    return {
        **report["share"], "height": size.height,
        "two_objects_direction": pairs["direction"], "two_objects_shape": pairs["shape"],
    }  # fmt: skip


if __name__ == "__main__":
    typer.run(main)
