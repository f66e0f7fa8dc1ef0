"""Training samples: captions and edits made by worker processes, kept as latents by layout."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from .captions import caption, random_wanted, scene_of
from .edits import random_edit
from .joint import Layout
from .prompts import VOCABULARY, prompt_ids, text_runs
from .rendering import Renderer, rows
from .scenes import Scene

_WITHOUT_A_PROMPT = 0.06
"""Share of pictures whose prompt is empty: what guidance takes as its negative prompt."""


class Drawn(NamedTuple):
    """A prompt's ids, and its references and target as numbers ``(references + 1, WIDTH)``."""

    ids: list[int]
    scenes: torch.Tensor


def drawn(seed: int, edits: float) -> Drawn:
    """One training sample by its number.

    Parameters
    ----------
    edits
        Share of samples that are edits.
    """
    rng = random.Random(seed)  # noqa: S311 - pictures, no secrets
    if rng.random() < edits:
        edit = random_edit(rng)
        scenes: list[Scene] = [*edit.references, edit.result]
        ids = prompt_ids(edit.instruction, len(edit.references))
    else:
        wanted = random_wanted(rng, held_out=False)
        scenes = [scene_of(wanted, rng)]
        ids = prompt_ids("" if rng.random() < _WITHOUT_A_PROMPT else caption(wanted), 0)
    return Drawn(ids, rows(scenes))


class _Draws(Dataset):
    def __init__(self, first: int, count: int, edits: float) -> None:
        self.first, self.count, self.edits = first, count, edits

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[list[int], torch.Tensor]:
        return tuple(drawn(self.first + index, self.edits))


def _together(samples: list) -> tuple[list[list[int]], list[int], torch.Tensor]:
    ids = [sample[0] for sample in samples]
    return ids, [len(sample[1]) for sample in samples], torch.cat([sample[1] for sample in samples])


def draws(
    first: int, count: int, edits: float, workers: int, batch: int = 256
) -> Iterator[tuple[list[list[int]], list[int], torch.Tensor]]:
    """Samples ``first`` to ``first + count``: ids, pictures of each, and all scenes in one."""
    return iter(
        DataLoader(
            _Draws(first, count, edits),
            batch_size=batch,
            num_workers=workers,
            collate_fn=_together,
            prefetch_factor=4 if workers else None,
        )
    )


def as_pixels(pictures: torch.Tensor) -> torch.Tensor:
    """uint8 ``(n, 256, 256, 4)`` to what the VAE takes: float ``(n, 4, 1, 256, 256)`` in -1..1."""
    return pictures.permute(0, 3, 1, 2)[:, :, None].float() / 127.5 - 1


class Pool:
    """Encoded samples by layout, on the device.

    Parameters
    ----------
    encode
        Pixels ``(n, 4, 1, 256, 256)`` to normalised latents ``(n, TOKENS, CHANNELS)``.
    device
        Where they are kept; 32 KiB a picture.
    """

    def __init__(
        self, encode: Callable[[torch.Tensor], torch.Tensor], device: torch.device
    ) -> None:
        self._encode, self._device = encode, device
        self._render = Renderer(device)
        self._parts: dict[Layout, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._whole: dict[Layout, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, ids: list[list[int]], counts: list[int], scenes: torch.Tensor) -> None:
        """Encode samples as `draws` gives them and keep them."""
        latents = self._encode(as_pixels(self._render(scenes)))
        latents = latents.to(torch.bfloat16)
        for tokens, latent in zip(ids, latents.split(counts)):
            texts, grids = self._parts.setdefault(Layout(text_runs(tokens)), ([], []))
            texts.append(torch.tensor([token for token in tokens if token != _PAD]))
            grids.append(latent)

    def settle(self, least: int) -> None:
        """Make every layout's samples one tensor; layouts with fewer than ``least`` go."""
        for layout, (texts, grids) in self._parts.items():
            if len(texts) >= least:
                self._whole[layout] = torch.stack(texts).to(self._device), torch.stack(grids)
        self._parts.clear()

    def sizes(self) -> dict[Layout, int]:
        """Number of samples by layout."""
        return {layout: len(texts) for layout, (texts, _) in self._whole.items()}

    def batch(self, layout: Layout, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Some random samples of a layout: ids, references' latents, target's latents."""
        texts, grids = self._whole[layout]
        at = torch.randint(len(texts), (size,), device=self._device)
        grid = grids[at]
        return texts[at], grid[:, :-1], grid[:, -1]


_PAD = VOCABULARY["<|image_pad|>"]
