"""Training of the transformer and of the words' embedding."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from diffusers import AutoencoderKLQwenImage21
from tqdm import tqdm

from .captured import Update
from .checker import summary
from .evaluation import Sampler, encode, sheet, tasks
from .flow import Losses
from .joint import Joint, Layout
from .models import CONTEXT, TOKENS, make_transformer, save_pipeline
from .prompts import VOCABULARY
from .samples import Pool, draws
from .train_vae import load_vae
from .training import Clock, captured_update, no_graph, read_state, write_state

_BETWEEN_STATES = 45
"""Seconds between two writings of what a stopped run would go on from."""


def train_transformer(args: argparse.Namespace, began: float) -> None:
    """Train the transformer and the embedding on encoded samples, and write the model."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    vae = load_vae(args.run, device)
    model = make_transformer(args.layers, args.heads).to(device)
    embedding = torch.nn.Parameter(torch.randn(len(VOCABULARY), CONTEXT, device=device))
    weights = {**dict(model.named_parameters()), "words": embedding}
    if args.resume:
        read_state(args.run, weights)
    pool = fill_pool(args, vae, device)
    layouts, shares = list(pool.sizes()), list(pool.sizes().values())
    matrices = [name for name, weight in weights.items() if weight.ndim == 2 and "blocks." in name]
    update = Update(weights, matrices, args.rate, 3 * args.rate)
    losses = Losses(Joint(model, args.compile), embedding, update.clear)
    batch = args.batch or (256 if device.type == "cuda" else 32)
    if device.type == "cuda":
        batch = capture_all(losses, pool, batch)
    apply = captured_update(update)
    rng = random.Random(args.seed)  # noqa: S311 - pictures, no secrets
    clock = Clock(args.minutes - (time.perf_counter() - began) / 60, args.cool)
    seen, written = 0, time.perf_counter()
    for _ in clock:
        clock.set(update)
        layout = rng.choices(layouts, shares)[0]
        size = samples_of(layout, batch)
        losses.batch(layout, size).load(*pool.batch(layout, size))
        clock.note(losses(layout))
        apply()
        seen += size
        if time.perf_counter() - written > _BETWEEN_STATES:
            write_state(args.run, update.average)
            written = time.perf_counter()
    clock.report(args.run, "transformer")
    print(
        f"{clock.step} steps, {seen} samples, {seen / clock.seconds:.0f} a second, "
        f"loss {clock.losses[-1][1]:.4f}"
    )
    losses.release()
    with torch.no_grad():
        for name, value in weights.items():
            value.copy_(update.average[name])
    write_state(args.run, update.average)
    save_pipeline(args.run / "model", vae, model, embedding.detach().cpu())
    if args.judge:
        judge(args.run, Joint(model, False), embedding.detach(), vae, args.judge)


def samples_of(layout: Layout, batch: int) -> int:
    """Samples in a batch: as many tokens, whatever the number of references."""
    return max(8, batch * 290 // (layout.prefix + TOKENS))


def fill_pool(args: argparse.Namespace, vae: AutoencoderKLQwenImage21, device) -> Pool:
    """Make and encode the training samples."""
    began = time.perf_counter()
    pool = Pool(lambda pixels: _in_parts(vae, pixels), device)
    for drawn in tqdm(
        draws(args.seed * 10**7, args.samples, args.edits, args.workers),
        total=math.ceil(args.samples / 256),
        desc="encoding",
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


def capture_all(losses: Losses, pool: Pool, batch: int) -> int:
    """Capture every layout's step; the batch to train with, a larger one where that failed."""
    began = time.perf_counter()
    for layout in pool.sizes():
        size = samples_of(layout, batch)
        losses.batch(layout, size).load(*pool.batch(layout, size))
    try:
        losses.capture()
    except RuntimeError as error:
        no_graph("transformer's step", error)
        losses.release()
        return 3 * batch
    print(f"steps captured in {time.perf_counter() - began:.0f} s", flush=True)
    return batch


def _in_parts(vae: AutoencoderKLQwenImage21, pixels: torch.Tensor) -> torch.Tensor:
    # As much at once as the GPU's memory or the processor's cache is good for.
    parts = pixels.split(256 if pixels.is_cuda else 16)
    with torch.autocast(pixels.device.type, torch.bfloat16):
        return torch.cat([encode(vae, part) for part in parts])


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
