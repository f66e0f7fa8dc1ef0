"""Train the small Qwen-Image-2.1: first its VAE, then its transformer and word embedding.

    python -m examples.tiny.train vae --minutes 2
    python -m examples.tiny.train transformer --minutes 8

Each writes to ``--run``: its state after every part of the time (a run that was stopped goes on
with ``--resume``), losses, sample sheets, and the folder ``model`` that the pipeline loads.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from .checker import summary
from .evaluation import Sampler, decode, encode, sheet, tasks
from .gradients import Gradients
from .joint import Joint, Layout
from .models import CONTEXT, TOKENS, make_transformer, make_vae, save_pipeline
from .prompts import VOCABULARY
from .samples import Pool, as_pixels, draws

_BETWEEN_STATES = 120
"""Seconds between two writings of what a stopped run would go on from."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("stage", choices=("vae", "transformer"))
    parser.add_argument("--run", type=Path, default=Path("build/tiny"), help="folder to write to")
    parser.add_argument(
        "--minutes", type=float, default=8, help="of the whole stage but its last judgement"
    )
    parser.add_argument("--pictures", type=int, default=12_000, help="for the VAE")
    parser.add_argument("--samples", type=int, default=160_000, help="for the transformer")
    parser.add_argument("--edits", type=float, default=0.5, help="share of edits in them")
    parser.add_argument("--batch", type=int, default=None, help="default 32, transformer 256")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument(
        "--cool", type=float, default=0.35, help="last share of the time, to rate 0"
    )
    parser.add_argument("--judge", type=int, default=100, help="held-out tasks of each sort")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the elementwise work")
    parser.add_argument("--resume", action="store_true", help="go on from what --run holds")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=3)
    return parser.parse_args()


class Clock:
    """Training by time: how much of it is over, the learning rate at it, a progress bar.

    Parameters
    ----------
    minutes
        In all.
    rate
        Learning rate after a short warm-up of `WARM_UP` steps.
    cool
        Last share of the time, in which the rate goes to 0.
    """

    WARM_UP = 150

    def __init__(self, minutes: float, rate: float, cool: float) -> None:
        self.seconds, self.rate, self.cool = minutes * 60, rate, cool
        self.began = time.perf_counter()
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.bar = tqdm(total=100, unit="%", mininterval=5)
        self._loss = None

    def __iter__(self):
        while self.over < 1:
            yield self.step
            self.step += 1
        self.bar.close()

    @property
    def over(self) -> float:
        """Share of the time that is over, 0 to 1 and more."""
        return (time.perf_counter() - self.began) / self.seconds

    def set_rate(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the optimizer's learning rate for this step."""
        rate = self.rate * min(1, (self.step + 1) / self.WARM_UP)
        rate *= min(1, max(0.0, 1 - self.over) / self.cool)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def note(self, loss: torch.Tensor) -> None:
        """Note a loss; it is read from the GPU every 50 steps."""
        loss = loss.detach()
        self._loss = loss if self._loss is None else torch.lerp(self._loss, loss, 0.05)
        if self.step % 50 == 0:
            self.losses.append((self.step, self._loss.item()))
            self.bar.n = min(100, round(100 * self.over, 1))
            self.bar.set_postfix(step=self.step, loss=f"{self.losses[-1][1]:.4f}")

    def report(self, folder: Path, name: str) -> None:
        """Write the losses."""
        (folder / f"{name}_losses.json").write_text(json.dumps(self.losses) + "\n")


def reject_unfinished(loss: torch.Tensor) -> None:
    """End a training that has no future."""
    if not math.isfinite(loss.item()):
        raise SystemExit("error: the loss is no number any more; try a lower --rate")


def train_vae(args: argparse.Namespace) -> None:
    """Train the VAE on pictures of the generated world, and write it."""
    device = torch.device(args.device)
    vae = make_vae().to(device)
    state = args.run / "vae.safetensors"
    if args.resume:
        vae.load_state_dict(load_file(state, device=str(device)))
    parts, held = [], 0
    for _, _, pictures in draws(10**9, args.pictures, 0.3, args.workers):
        parts.append(pictures)
        held += len(pictures)
        if held >= args.pictures:
            break
    pictures = torch.cat(parts)[: args.pictures].to(device)
    batch = args.batch or 32
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    clock = Clock(args.minutes, args.rate, args.cool)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    for _ in clock:
        clock.set_rate(optimizer)
        pixels = as_pixels(pictures[torch.randint(len(pictures), (batch,), device=device)])
        with mixed:
            posterior = vae.encode(pixels).latent_dist
            mean, variance = posterior.mean.float(), posterior.var.float()
            latents = mean + variance.sqrt() * torch.randn_like(mean)
            seen = vae.decode(latents).sample.float()
        error = (seen - pixels).abs()
        # Under alpha 0 the colour does not show, so it matters less; but it does a little: the
        # references that the model sees have one there, too.
        weight = torch.where(pixels[:, 3:] < -0.9, 0.2, 1.0).expand_as(error).clone()
        weight[:, 3] = 1
        divergence = 0.5 * (mean.square() + variance - 1 - variance.log()).mean()
        loss = (error * weight).mean() + 0.5 * (error.square() * weight).mean()
        loss = loss + 2e-4 * divergence
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        clock.note(loss)
        if clock.step % 500 == 0:
            reject_unfinished(loss)
    args.run.mkdir(parents=True, exist_ok=True)
    clock.report(args.run, "vae")
    vae.eval()
    _measure_latents(vae, pictures[:2048])
    save_file({k: v.contiguous() for k, v in vae.state_dict().items()}, state)
    statistics = {key: vae.config[key] for key in ("latents_mean", "latents_std")}
    (args.run / "vae.json").write_text(json.dumps(statistics) + "\n")
    shown = pictures[:12]
    again = decode(vae, encode(vae, as_pixels(shown)))
    error = (torch.from_numpy(again).float() - shown.cpu().float()).square().mean().item()
    print(f"VAE after {clock.step} steps: PSNR {10 * math.log10(255**2 / error):.1f} dB")
    deviation = torch.tensor(vae.config.latents_std)
    print(f"deviations of latents: {deviation.min():.3f} to {deviation.max():.3f}")
    sheet(
        [("drawn", list(shown.cpu().numpy())), ("through the VAE", list(again))],
        args.run / "vae.png",
    )


def _measure_latents(vae: AutoencoderKLQwenImage21, pictures: torch.Tensor) -> None:
    """Put mean and deviation of the latents into the VAE's configuration.

    A channel that the VAE does not use has next to no deviation; dividing by it would make the
    transformer learn its rounding. So none is taken for less than a quarter of the median.
    """
    found = torch.cat([encode(vae, as_pixels(part)) for part in pictures.split(64)]).flatten(0, 1)
    deviation = found.std(0)
    deviation = deviation.clamp(min=deviation.median() / 4)
    vae.register_to_config(latents_mean=found.mean(0).tolist(), latents_std=deviation.tolist())


def load_vae(run: Path, device: torch.device) -> AutoencoderKLQwenImage21:
    """The VAE that `train_vae` wrote."""
    vae = make_vae()
    vae.load_state_dict(load_file(run / "vae.safetensors"))
    vae.register_to_config(**json.loads((run / "vae.json").read_text()))
    return vae.to(device).eval().requires_grad_(False)


def train_transformer(args: argparse.Namespace, began: float) -> None:
    """Train the transformer and the embedding on encoded samples, and write the model."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    vae = load_vae(args.run, device)
    model = make_transformer(args.layers, args.heads).to(device)
    embedding = torch.nn.Parameter(torch.randn(len(VOCABULARY), CONTEXT, device=device))
    weights = {**dict(model.named_parameters()), "words": embedding}
    if args.resume:
        for path in sorted(args.run.glob("state*.safetensors")):
            for name, value in load_file(path).items():
                weights[name].data.copy_(value)
    pool = fill_pool(args, vae, device)
    layouts, shares = list(pool.sizes()), list(pool.sizes().values())
    gradients = Gradients(Joint(model, args.compile), embedding, list(weights.values()))
    batch = args.batch or 256
    if device.type == "cuda":
        batch = capture_all(gradients, pool, batch)
    average = {name: value.detach().clone() for name, value in weights.items()}
    matrices = [w for w in weights.values() if w.ndim == 2 and w is not embedding]
    others = [w for w in weights.values() if w.ndim != 2 or w is embedding]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}],
        lr=args.rate,
        betas=(0.9, 0.97),
        fused=device.type == "cuda",
    )
    rng = random.Random(args.seed)  # noqa: S311 - pictures, no secrets
    left = args.minutes * 60 - (time.perf_counter() - began)
    clock = Clock(left / 60, args.rate, args.cool)
    seen, written = 0, time.perf_counter()
    for _ in clock:
        clock.set_rate(optimizer)
        layout = rng.choices(layouts, shares)[0]
        size = samples_of(layout, batch)
        gradients.batch(layout, size).load(*pool.batch(layout, size))
        loss = gradients(layout)
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        seen += size
        with torch.no_grad():
            keep = min(0.999, (clock.step + 1) / (clock.step + 10))
            torch._foreach_lerp_(
                list(average.values()), [w.detach() for w in weights.values()], 1 - keep
            )
        clock.note(loss)
        if clock.step % 500 == 0:
            reject_unfinished(loss)
        if time.perf_counter() - written > _BETWEEN_STATES:
            write_state(args.run, average)
            written = time.perf_counter()
    clock.report(args.run, "transformer")
    print(
        f"{clock.step} steps, {seen} samples, {seen / clock.seconds:.0f} a second, "
        f"loss {clock.losses[-1][1]:.4f}"
    )
    gradients.release()
    with torch.no_grad():
        for name, value in weights.items():
            value.copy_(average[name])
    write_state(args.run, average)
    save_pipeline(args.run / "model", vae, model, embedding.detach().cpu())
    judge(args.run, Joint(model, False), embedding.detach(), vae, args.judge)


def samples_of(layout: Layout, batch: int) -> int:
    """Samples in a batch: as many tokens, whatever the number of references."""
    return max(8, batch * 290 // (layout.prefix + TOKENS))


def fill_pool(args: argparse.Namespace, vae: AutoencoderKLQwenImage21, device) -> Pool:
    """Draw and encode the training samples."""
    began = time.perf_counter()
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    pool = Pool(lambda pixels: _in_parts(vae, pixels, mixed), device)
    for drawn in tqdm(
        draws(args.seed * 10**7, args.samples, args.edits, args.workers),
        total=math.ceil(args.samples / 64),
        desc="drawing and encoding",
        mininterval=5,
    ):
        pool.add(*drawn)
    pool.settle(least=min(200, args.samples // 100))
    sizes = pool.sizes()
    print(
        f"{sum(sizes.values())} samples of {len(sizes)} layouts "
        f"in {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return pool


def capture_all(gradients: Gradients, pool: Pool, batch: int) -> int:
    """Capture every layout's step; the batch to train with, a larger one where that failed."""
    began = time.perf_counter()
    for layout in pool.sizes():
        size = samples_of(layout, batch)
        gradients.batch(layout, size).load(*pool.batch(layout, size))
    try:
        gradients.capture(list(pool.sizes()))
    except RuntimeError as error:
        print(f"no CUDA graphs, eager steps of larger batches instead: {error}", flush=True)
        torch.cuda.synchronize()
        gradients.release()
        gradients.forget()
        return 3 * batch
    print(f"steps captured in {time.perf_counter() - began:.0f} s", flush=True)
    return batch


def write_state(run: Path, weights: dict[str, torch.Tensor], most: int = 14 << 20) -> None:
    """Write float32 weights to go on from, in files of at most 14 MiB."""
    for old in run.glob("state*.safetensors"):
        old.unlink()
    parts: list[dict[str, torch.Tensor]] = [{}]
    for name, value in weights.items():
        if sum(part.nbytes for part in parts[-1].values()) + value.nbytes > most:
            parts.append({})
        parts[-1][name] = value.detach().cpu().contiguous()
    for number, part in enumerate(parts):
        save_file(part, run / f"state{number}.safetensors")


def _in_parts(vae: AutoencoderKLQwenImage21, pixels: torch.Tensor, mixed) -> torch.Tensor:
    with mixed:
        return torch.cat([encode(vae, part) for part in pixels.split(256)])


def judge(
    run: Path,
    joint: Joint,
    embedding: torch.Tensor,
    vae: AutoencoderKLQwenImage21,
    count: int,
) -> None:
    """Sample, check and show so many held-out prompts, edits and combinations of each."""
    sampler = Sampler(joint, embedding, vae)
    figures, rows = {}, []
    for kind in ("prompts", "edits", "combinations"):
        asked = tasks(kind, count)
        made = sampler(asked)
        figures[kind] = summary(task.judge(picture) for task, picture in zip(asked, made))
        print(kind, {key: round(value, 3) for key, value in figures[kind].items()}, flush=True)
        for task, picture in list(zip(asked, made))[:10]:
            right = "right" if task.judge(picture).all else "wrong"
            rows.append((f"{task.prompt} [{right}]", [*task.references, picture, task.example()]))
    (run / "held_out.json").write_text(json.dumps(figures, indent=1) + "\n")
    sheet(rows, run / "held_out.png")


def main() -> None:
    """Train a stage."""
    began = time.perf_counter()
    args = parse()
    args.run.mkdir(parents=True, exist_ok=True)
    if args.stage == "vae":
        train_vae(args)
    else:
        train_transformer(args, began)


if __name__ == "__main__":
    main()
