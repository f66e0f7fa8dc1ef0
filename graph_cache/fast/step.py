"""The decode step of the fast profile, over what an adapter says of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..prefix import PrefixBuffers
from .attention import Attention
from .fused import FusedLinear
from .ops import Ops


@dataclass
class FastBlock:
    """One transformer block, as functions over the model's own layers.

    Attributes
    ----------
    qkv
        ``(batch, tokens, width)`` to query, key and value of that shape.
    turn
        `graph_cache.fast.ops.Ops.turn` with the block's norms: query, key, value, RoPE, target.
    out
        Projection of attention's output.
    mlp
        The feed-forward layer.
    """

    qkv: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    turn: Callable[..., torch.Tensor]
    out: Callable[[torch.Tensor], torch.Tensor]
    mlp: Callable[[torch.Tensor], torch.Tensor]


@dataclass
class FastModel:
    """A model's blocks, and what runs them; holds no weight.

    Attributes
    ----------
    blocks
        In order.
    eps
        Of the blocks' layer norms.
    ops
        Runs the elementwise operations.
    attention
        Runs attention.
    joined
        By name, layers that run as one product where they can, a block each.
    """

    blocks: list[FastBlock]
    eps: float
    ops: Ops
    attention: Attention
    joined: dict[str, list[FusedLinear]] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, str]:
        """What runs each operation, for a report."""
        return {
            "elementwise": self.ops.name,
            "attention": self.attention.name,
            **{name: _products(linears) for name, linears in self.joined.items()},
        }

    def join(self, storages: set[int]) -> None:
        """Join what can be and is not, see `graph_cache.fast.fused.FusedLinear.join`."""
        moved = [linear.join(storages) for linears in self.joined.values() for linear in linears]
        if any(moved) and torch.cuda.is_initialized():
            # What the single weights lay in fits nothing else.
            torch.cuda.empty_cache()


def _products(linears: list[FusedLinear]) -> str:
    apart = [linear for linear in linears if not linear.one]
    if not apart:
        return "one product"
    joined = len(linears) - len(apart)
    return f"one product in {joined} of {len(linears)} blocks ({apart[0].why_not})"


@dataclass
class Modulation:
    """A step's modulation, ``(batch, width)`` float32 each.

    Attributes
    ----------
    scale1, gate1, scale2, gate2
        Of every block: the factor after each norm (1 included), and the gate (after tanh).
    scale_out
        The factor after the last norm.
    """

    scale1: torch.Tensor
    gate1: torch.Tensor
    scale2: torch.Tensor
    gate2: torch.Tensor
    scale_out: torch.Tensor


def decode(
    model: FastModel,
    hidden: torch.Tensor,
    modulation: Modulation,
    rope: torch.Tensor,
    buffers: PrefixBuffers,
    bring: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """All blocks and the last norm; it never waits for the GPU.

    Parameters
    ----------
    model
        The blocks.
    hidden
        ``(batch, target, width)``, contiguous; it is changed in place.
    modulation
        Of the step.
    rope
        ``(target, head_dim / 2, 2)`` float32, cosine and sine.
    buffers
        With the prefix stored. The target's K/V are written to them.
    bring
        Called with each block's index before it runs, where weights have to be brought.

    Returns
    -------
    torch.Tensor
        ``(batch, target, width)``, normed and modulated, for the output projection.
    """
    ops, eps = model.ops, model.eps
    heads = (-1, buffers.shape.head_dim)
    normed = ops.norm(hidden, modulation.scale1, eps)
    last = len(model.blocks) - 1
    for index, block in enumerate(model.blocks):
        if bring is not None:
            bring(index)
        query, key, value = (part.unflatten(-1, heads) for part in block.qkv(normed))
        query = block.turn(query, key, value, rope, buffers.target(index))
        mixed = model.attention.function(query, *buffers.joined(index))
        mixed = block.out(mixed.flatten(2))
        normed = ops.gate_norm(hidden, mixed, modulation.gate1, modulation.scale2, eps)
        scale = modulation.scale_out if index == last else modulation.scale1
        normed = ops.gate_norm(hidden, block.mlp(normed), modulation.gate2, scale, eps)
    return normed
