"""What a cached prefix and a captured graph belong to: the sequence's layout and the key.

Qwen-Image-2.1 runs over one joint sequence: runs of text with reference images spliced in between,
the target image last. Everything before the target is the prefix. Two layouts can have
the same number of tokens and different RoPE (a 32x64 and a 64x32 reference), so nothing here is
ever compared by token counts alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Profile = Literal["exact", "fast"]
"""Kernels of a decode step. ``exact``: bit for bit the model's own cached step; ``fast``: the same
mathematics through other kernels."""

Grid = tuple[int, int, int]
"""Frames, height and width of an image in latent tokens."""


def grid_tokens(grid: Grid) -> int:
    """Number of tokens of a grid."""
    frames, height, width = grid
    return frames * height * width


@dataclass(frozen=True)
class SequenceLayout:
    """The joint sequence of one conditioning.

    Parameters
    ----------
    text_runs
        Lengths of the text runs, in tokens; run ``i`` stands before image ``i``, the last run
        before the target. Always one longer than `references`; a run may be empty.
    references
        Grids of the reference images, in the order of the sequence.
    target
        Grid of the target image.

    Raises
    ------
    ValueError
        If the number of runs does not fit the number of references, or a length is not positive.
    """

    text_runs: tuple[int, ...]
    references: tuple[Grid, ...]
    target: Grid

    def __post_init__(self) -> None:
        if len(self.text_runs) != len(self.references) + 1:
            raise ValueError(
                f"{len(self.text_runs)} text runs do not fit {len(self.references)} references"
            )
        if min(self.text_runs) < 0:
            raise ValueError(f"negative text run in {self.text_runs}")
        if any(side < 1 for grid in (*self.references, self.target) for side in grid):
            raise ValueError(f"empty image among {(*self.references, self.target)}")

    @property
    def reference_tokens(self) -> int:
        """Tokens of all reference images."""
        return sum(grid_tokens(grid) for grid in self.references)

    @property
    def prefix_tokens(self) -> int:
        """Tokens of text and references: what the persistent buffers hold."""
        return sum(self.text_runs) + self.reference_tokens

    @property
    def target_tokens(self) -> int:
        """Tokens of the target image."""
        return grid_tokens(self.target)

    def image_mask(self) -> list[bool]:
        """One flag a token of the joint sequence: True at image tokens."""
        mask: list[bool] = []
        for run, grid in zip(self.text_runs, (*self.references, self.target)):
            mask += [False] * run + [True] * grid_tokens(grid)
        return mask


@dataclass(frozen=True)
class CacheKey:
    """What two runs must share before they may share buffers and a graph.

    The weights are not part of the key: a graph remembers the addresses it was captured over and
    is dropped as soon as they differ (`graph_cache.manager`), since addresses that are gone never
    come back as a key would suggest.

    Parameters
    ----------
    layout
        The whole layout, never its token counts.
    batch
        Rows of the batch.
    dtype, device
        Of the hidden states; the device with its index.
    strides
        Of the hidden states. The pipeline hands its latents over transposed, and a matrix product
        over transposed memory is another kernel, which may round otherwise.
    attention
        Name of the attention function that the decode step calls.
    settings
        `graph_cache.settings.numeric_settings`.
    profile
        Of the decode step.
    """

    layout: SequenceLayout
    batch: int
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    attention: str
    settings: tuple[str, ...]
    profile: Profile = "exact"
