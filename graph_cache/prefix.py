"""Persistent K/V buffers of one conditioning: filled once by the prefill, addresses fixed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Arrangement = Literal["per_layer", "shared"]
"""``per_layer``: one [prefix | target] buffer a layer; a step only writes its target K/V.
``shared``: the prefix a layer, and one [prefix | target] buffer that all layers use in turn; each
layer copies its prefix in first. Attention reads the same bytes in the same order either way."""

SHORT_PREFIX = 1 / 4
"""Up to this part of the target's length a prefix counts as short. Copying it costs next to
nothing then, while room for a target of 1024 x 1024 pixels in every layer takes 2 GiB in the 7 B
model (docs/performance.md)."""


@dataclass(frozen=True)
class PrefixShape:
    """Sizes of the buffers of one conditioning.

    Parameters
    ----------
    layers, batch, prefix, target, heads, head_dim
        Numbers of transformer blocks, batch rows, prefix tokens, target tokens, attention heads
        and channels a head.
    dtype
        Of K and V.
    """

    layers: int
    batch: int
    prefix: int
    target: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    def nbytes(self, arrangement: Arrangement) -> int:
        """Bytes that `PrefixBuffers` will allocate.

        For the 7 B model in bf16 the prefix alone takes 2 * 32 * 4096 * 2 B = 0.5 MiB a token and
        batch row, and so does the target in the ``per_layer`` arrangement.
        """
        token = 2 * self.batch * self.heads * self.head_dim * self.dtype.itemsize
        if arrangement == "per_layer":
            return token * self.layers * (self.prefix + self.target)
        return token * (self.layers * self.prefix + self.prefix + self.target)


def preferred_arrangements(shape: PrefixShape) -> tuple[Arrangement, ...]:
    """Arrangements to try, the preferred one first.

    A short prefix is copied in every layer; a long one (reference images) only where the device
    has no room to spare.
    """
    if shape.prefix <= SHORT_PREFIX * shape.target:
        return ("shared",)
    return ("per_layer", "shared")


class PrefixBuffers:
    """K and V of the prefix, and room for the target's, at addresses that never change.

    Allocated outside inference mode, so that a later run may write to them in any grad mode.

    Parameters
    ----------
    shape
        Sizes.
    device
        Where to allocate.
    arrangement
        See `Arrangement`.

    Raises
    ------
    torch.OutOfMemoryError
        If the device has no room.
    """

    def __init__(self, shape: PrefixShape, device: torch.device, arrangement: Arrangement) -> None:
        self.shape = shape
        self.arrangement = arrangement
        tokens = shape.prefix + shape.target

        def allocate(length: int) -> torch.Tensor:
            # K and V are separate tensors: each must be contiguous over [batch, tokens] exactly as
            # the concatenation it replaces, or attention may pick another kernel.
            return torch.empty(
                shape.batch, length, shape.heads, shape.head_dim, dtype=shape.dtype, device=device
            )

        with torch.inference_mode(False):
            if arrangement == "per_layer":
                self._full = [(allocate(tokens), allocate(tokens)) for _ in range(shape.layers)]
                self._prefix = [
                    (key[:, : shape.prefix], value[:, : shape.prefix]) for key, value in self._full
                ]
            else:
                scratch = (allocate(tokens), allocate(tokens))
                self._full = [scratch] * shape.layers
                self._prefix = [
                    (allocate(shape.prefix), allocate(shape.prefix)) for _ in range(shape.layers)
                ]
            self._target = [
                (key[:, shape.prefix :], value[:, shape.prefix :]) for key, value in self._full
            ]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.shape.nbytes(self.arrangement)

    def storages(self) -> set[int]:
        """Addresses of the buffers' memory."""
        pairs = (*self._full, *self._prefix)
        return {t.untyped_storage().data_ptr() for pair in pairs for t in pair}

    def prefix(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer's prefix, ``(batch, prefix, heads, head_dim)``; views, not copies."""
        return self._prefix[layer]

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Fill a layer's prefix.

        Parameters
        ----------
        layer
            Index of the transformer block.
        key, value
            ``(batch, prefix, heads, head_dim)``; K after RoPE.

        Raises
        ------
        ValueError
            If shape or dtype are not those of the buffers: a copy would broadcast or convert.
        """
        for source, buffer in zip((key, value), self._prefix[layer]):
            if source.shape != buffer.shape or source.dtype != buffer.dtype:
                raise ValueError(
                    f"layer {layer}: prefix K/V of {tuple(source.shape)} {source.dtype} do not fit "
                    f"buffers of {tuple(buffer.shape)} {buffer.dtype}"
                )
            buffer.copy_(source)

    def target(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a layer writes the target's K and V: ``(batch, target, heads, head_dim)``."""
        return self._target[layer]

    def joined(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that a layer's attention reads: ``(batch, prefix + target, heads, head_dim)``.

        Call it after writing `target`, once a layer and step.
        """
        if self.arrangement == "shared":
            for buffer, prefix in zip(self._full[layer], self._prefix[layer]):
                buffer[:, : self.shape.prefix].copy_(prefix)
        return self._full[layer]
