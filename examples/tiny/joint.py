"""The transformer's whole-sequence forward for training: the same mathematics, made for speed.

`QwenImage21Transformer2DModel.forward` reads the layout of every call back from the GPU and runs a
step's elementwise work kernel by kernel. Here the layout is given and that work is compiled. The
weights are the model's own; a test compares the two forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from diffusers import QwenImage21Transformer2DModel

from .models import GRID, TOKENS


@dataclass(frozen=True)
class Layout:
    """Text tokens before each reference and, last, before the target: all pictures 256 x 256."""

    runs: tuple[int, ...]

    @property
    def references(self) -> int:
        """Number of reference pictures."""
        return len(self.runs) - 1

    @property
    def prefix(self) -> int:
        """Tokens before the target."""
        return sum(self.runs) + self.references * TOKENS

    def segments(self) -> list[tuple[int, int, bool]]:
        """Start, end and whether it is text, of every run and reference of the prefix."""
        found, at = [], 0
        for index, run in enumerate(self.runs):
            if run:
                found.append((at, at + run, True))
            at += run
            if index < self.references:
                found.append((at, at + TOKENS, False))
                at += TOKENS
        return found


@lru_cache(maxsize=4096)
def _positions(layout: Layout) -> torch.Tensor:
    """Frame, height and width position of every token, ``(3, tokens)``, as diffusers' RoPE."""
    grid = torch.arange(-(GRID - GRID // 2), GRID // 2)
    rows, columns = (part.flatten() for part in torch.meshgrid(grid, grid, indexing="ij"))
    found, at = [], 0
    for run in layout.runs:
        found.append(torch.arange(at, at + run).expand(3, run))
        at += run
        found.append(torch.stack([torch.full_like(rows, at), rows, columns]))
        at += GRID
    return torch.cat(found, dim=1)


class Joint:
    """Runs a transformer over text, references and target.

    Parameters
    ----------
    model
        On its device; trained through here.
    compiled
        Whether to compile the elementwise work.
    """

    def __init__(self, model: QwenImage21Transformer2DModel, compiled: bool) -> None:
        self.model = model
        self.device = model.img_in.weight.device
        self._rope: dict[Layout, tuple[torch.Tensor, torch.Tensor]] = {}
        functions = (_modulated, _turned, _gated, _swiglu)
        if compiled:
            functions = tuple(torch.compile(function, dynamic=True) for function in functions)
        self._modulated, self._turned, self._gated, self._swiglu = functions

    def __call__(
        self,
        layout: Layout,
        text: torch.Tensor,
        references: torch.Tensor,
        target: torch.Tensor,
        sigma: torch.Tensor,
    ) -> torch.Tensor:
        """Predict the target's velocity.

        Parameters
        ----------
        layout
            Of every row.
        text
            Prompt embeddings without image slots, ``(batch, sum(layout.runs), context)``.
        references
            Latents ``(batch, layout.references, TOKENS, channels)``.
        target
            Noisy latents ``(batch, TOKENS, channels)``.
        sigma
            Noise levels in (0, 1], ``(batch,)``.

        Returns
        -------
        Tensor
            ``(batch, TOKENS, channels)``.
        """
        model, prefix = self.model, layout.prefix
        words = model.txt_in(text).split(list(layout.runs), dim=1)
        pictures = [*references.unbind(1), target]
        parts = []
        for run, picture in zip(words, pictures):
            parts += [run, model.img_in(picture).to(run.dtype)]
        hidden = torch.cat(parts, dim=1)
        levels = torch.cat([sigma, sigma.new_zeros(1)])
        embedded = model.time_text_embed(levels, hidden)
        modulation = model.modulation(embedded)
        is_target = torch.arange(hidden.shape[1], device=self.device)[None, :, None] >= prefix
        first, second = modulation.chunk(2, dim=-1)
        for block in model.transformer_blocks:
            hidden = self._block(block, hidden, first, second, is_target, layout)
        hidden = hidden[:, prefix:]
        scale = model.norm_out.linear(F.silu(embedded[:-1]))[:, None]
        hidden = F.layer_norm(hidden, hidden.shape[-1:], eps=model.norm_out.norm.eps) * (1 + scale)
        return model.proj_out(hidden)

    def _block(self, block, hidden, first, second, is_target, layout: Layout) -> torch.Tensor:
        scale, gate = first.chunk(2, dim=-1)
        attn = block.attn
        x = self._modulated(hidden, scale, is_target)
        cos, sin = self._angles(layout)
        q, k, v = (
            linear(x).unflatten(-1, (attn.heads, -1))
            for linear in (attn.to_q, attn.to_k, attn.to_v)
        )
        q = self._turned(q, attn.norm_q.weight, cos, sin, v.dtype).transpose(1, 2)
        k = self._turned(k, attn.norm_k.weight, cos, sin, v.dtype).transpose(1, 2)
        mixed = _attention(q, k, v.transpose(1, 2), layout)
        mixed = attn.to_out[0](mixed.transpose(1, 2).flatten(2))
        hidden = self._gated(hidden, mixed, gate, is_target)
        scale, gate = second.chunk(2, dim=-1)
        x = self._modulated(hidden, scale, is_target)
        mlp = block.img_mlp
        mixed = mlp.out(self._swiglu(mlp.gate_layer(x), mlp.proj(x)))
        return self._gated(hidden, mixed, gate, is_target)

    def _angles(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        if layout not in self._rope:
            at = _positions(layout)
            turns = torch.cat(
                [table.cpu()[row] for table, row in zip(self.model.pos_embed.freqs, at)], dim=-1
            ).to(self.device)
            self._rope[layout] = turns.real.contiguous(), turns.imag.contiguous()
        return self._rope[layout]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Text sees what is before it, a picture besides all of itself; ``(batch, heads, n, 128)``."""
    found = []
    for start, end, is_text in layout.segments():
        mask = None
        if is_text:
            mask = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
        found.append(
            F.scaled_dot_product_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], mask)
        )
    found.append(F.scaled_dot_product_attention(q[:, :, layout.prefix :], k, v))
    return torch.cat(found, dim=2)


def _rows(rows: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    """The target's tokens take their sample's row, all others the last one, which is of t = 0."""
    return torch.where(is_target, rows[:-1, None], rows[-1:, None])


def _modulated(x: torch.Tensor, scale: torch.Tensor, is_target: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + _rows(scale, is_target))


def _turned(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """RMS norm and rotation of ``(batch, n, heads, 128)`` by ``(n, 64)``."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(dtype)


def _gated(
    x: torch.Tensor, more: torch.Tensor, gate: torch.Tensor, is_target: torch.Tensor
) -> torch.Tensor:
    return x + torch.tanh(_rows(gate, is_target)) * more


def _swiglu(gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * value
