"""What the small model makes of held-out prompts and edits: batches of pictures, judged."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from PIL import Image, ImageDraw

from .captions import Wanted, caption, random_wanted, scene_of
from .checker import Verdict, check, check_scene
from .edits import Edit, random_edit
from .joint import Joint, Layout
from .models import CHANNELS, GRID, TOKENS, shifted
from .prompts import VOCABULARY, prompt_ids, text_runs
from .samples import as_pixels
from .scenes import draw


class Task(NamedTuple):
    """A prompt, its reference pictures ``(256, 256, 4)`` uint8, and what the result must show."""

    prompt: str
    references: tuple[np.ndarray, ...]
    asked: Wanted | Edit

    def judge(self, rgba: np.ndarray) -> Verdict:
        """The checker's verdict of a result."""
        if isinstance(self.asked, Edit):
            return check_scene(rgba, self.asked.result)
        return check(rgba, self.asked)

    def example(self) -> np.ndarray:
        """One right picture, drawn."""
        if isinstance(self.asked, Edit):
            return draw(self.asked.result)
        return draw(scene_of(self.asked, random.Random(0)))  # noqa: S311


def tasks(kind: str, count: int, seed: int = 1, held_out: bool = True) -> list[Task]:
    """Prompts and edits for evaluation.

    Parameters
    ----------
    kind
        "prompts", "edits" with one reference, or "combinations" of two or three.
    count
        How many.
    seed
        Of the draw.
    held_out
        Whether each shows a combination that training never did.
    """
    rng = random.Random(f"{kind} {seed}")  # noqa: S311 - pictures, no secrets
    made: list[Task] = []
    while len(made) < count:
        if kind == "prompts":
            wanted = random_wanted(rng, held_out)
            made.append(Task(caption(wanted), (), wanted))
            continue
        edit = random_edit(rng, held_out=held_out)
        if (len(edit.references) == 1) == (kind == "edits"):
            made.append(Task(edit.instruction, tuple(map(draw, edit.references)), edit))
    return made


class Sampler:
    """Makes pictures in batches of one layout, with the pipeline's schedule.

    Parameters
    ----------
    joint
        The transformer.
    embedding
        ``(len(VOCABULARY), CONTEXT)``.
    vae
        With its statistics of latents in its configuration.
    """

    def __init__(
        self, joint: Joint, embedding: torch.Tensor, vae: AutoencoderKLQwenImage21
    ) -> None:
        self._joint, self._embedding, self._vae = joint, embedding, vae

    @torch.no_grad()
    def __call__(self, asked: Sequence[Task], steps: int = 20, seed: int = 0) -> list[np.ndarray]:
        """Pictures of tasks, uint8 ``(256, 256, 4)`` each."""
        groups: dict[Layout, list[int]] = defaultdict(list)
        ids = [prompt_ids(task.prompt, len(task.references)) for task in asked]
        for index, tokens in enumerate(ids):
            groups[Layout(text_runs(tokens))].append(index)
        made: list[np.ndarray | None] = [None] * len(asked)
        for layout, members in groups.items():
            for at in range(0, len(members), 64):
                part = members[at : at + 64]
                pictures = self._group(
                    layout, [ids[i] for i in part], [asked[i] for i in part], steps, seed
                )
                for index, picture in zip(part, pictures):
                    made[index] = picture
        return made

    def _group(
        self, layout: Layout, ids: list[list[int]], asked: list[Task], steps: int, seed: int
    ) -> np.ndarray:
        device = self._joint.device
        words = [[token for token in row if token != VOCABULARY["<|image_pad|>"]] for row in ids]
        text = self._embedding[torch.tensor(words, device=device)]
        references = torch.zeros(len(asked), 0, TOKENS, CHANNELS, device=device)
        if layout.references:
            pictures = torch.from_numpy(np.stack([p for task in asked for p in task.references]))
            references = encode(self._vae, as_pixels(pictures.to(device)))
            references = references.unflatten(0, (len(asked), layout.references))
        generator = torch.Generator().manual_seed(seed)
        latents = torch.randn(len(asked), TOKENS, CHANNELS, generator=generator).to(device)
        sigmas = shifted(torch.linspace(1, 0, steps + 1))
        for now, then in pairwise(sigmas):
            sigma = now.expand(len(asked)).to(device)
            velocity = self._joint(layout, text, references, latents, sigma)
            latents = latents + (then - now) * velocity.float()
        return decode(self._vae, latents)


def _statistics(vae: AutoencoderKLQwenImage21, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.tensor(values, device=like.device, dtype=like.dtype)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage21, pixels: torch.Tensor) -> torch.Tensor:
    """Pixels ``(n, 4, 1, 256, 256)`` to normalised latents ``(n, TOKENS, CHANNELS)``."""
    latents = vae.encode(pixels).latent_dist.mode()[:, :, 0].flatten(2).transpose(1, 2).float()
    mean, std = _statistics(vae, latents)
    return (latents - mean) / std


@torch.no_grad()
def decode(vae: AutoencoderKLQwenImage21, latents: torch.Tensor) -> np.ndarray:
    """Normalised latents ``(n, TOKENS, CHANNELS)`` to uint8 ``(n, 256, 256, 4)``."""
    mean, std = _statistics(vae, latents)
    latents = (latents * std + mean).transpose(1, 2).unflatten(2, (GRID, GRID))[:, :, None]
    # `decode` one by one or all at once gives the same; the batch bounds the memory.
    pixels = torch.cat([vae.decode(part).sample[:, :, 0] for part in latents.split(16)])
    return (
        ((pixels.float() + 1) * 127.5)
        .round()
        .clamp(0, 255)
        .byte()
        .permute(0, 2, 3, 1)
        .cpu()
        .numpy()
    )


def sheet(rows: Sequence[tuple[str, Sequence[np.ndarray]]], path: Path, scale: int = 2) -> None:
    """Write rows of pictures with a line of text above each, over a checkered ground.

    Parameters
    ----------
    rows
        Text and uint8 pictures ``(256, 256, 4)``.
    path
        PNG file.
    scale
        A picture is shown at this fraction of its side.
    """
    side, gap, line = 256 // scale, 4, 14
    width = max(len(pictures) for _, pictures in rows) * (side + gap) + gap
    image = Image.new("RGB", (max(width, 320), len(rows) * (side + line + gap) + gap), "white")
    pen = ImageDraw.Draw(image)
    field = np.indices((side, side)).sum(0) // 8 % 2
    ground = Image.fromarray(np.where(field, 205, 235).astype(np.uint8)).convert("RGB")
    for row, (text, pictures) in enumerate(rows):
        top = row * (side + line + gap) + gap
        pen.text((gap, top), text, fill="black")
        for column, picture in enumerate(pictures):
            at = (gap + column * (side + gap), top + line)
            shown = Image.fromarray(picture).resize((side, side))
            image.paste(ground, at)
            image.paste(shown.convert("RGB"), at, shown.getchannel("A"))
    image.save(path)
