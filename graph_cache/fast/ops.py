"""The elementwise operations of a fast step, and which implementation runs them.

Each takes and gives the model's dtype and computes in float32. `TorchOps` runs everywhere and is
what the tests compare the Triton kernels with; a test compares it with float64.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
import torch.nn.functional as F


class Ops(Protocol):
    """What a fast step asks for beside matrix products and attention."""

    name: str
    """For reports."""

    def norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """Layer norm without weights, times a scale of the row's sample.

        Parameters
        ----------
        x
            ``(batch, tokens, width)``.
        scale
            ``(batch, width)`` float32.
        eps
            Of the norm.
        """

    def gate_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        gate: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """``x += gate * y`` in place, and `norm` of the sum before it is rounded.

        Parameters
        ----------
        x, y
            ``(batch, tokens, width)``, contiguous.
        gate, scale
            ``(batch, width)`` float32.
        eps
            Of the norm.
        """

    def turn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float],
        rope: torch.Tensor,
        target: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """RMS norm and RoPE of query and key; key and value go straight to their buffers.

        Parameters
        ----------
        query, key, value
            ``(batch, tokens, heads, head_dim)``, the last dimension contiguous.
        norms
            Weights ``(head_dim,)`` of query's and key's norm, and its epsilon.
        rope
            ``(tokens, head_dim / 2, 2)`` float32: cosine and sine of each pair's angle.
        target
            Where key and value are written, of their shapes.

        Returns
        -------
        torch.Tensor
            The query, contiguous.
        """

    def swiglu(self, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * value``; ``(batch, tokens, width)``, the last dimension contiguous."""


class TorchOps:
    """torch's own operations, one after the other."""

    name = "torch"

    def norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.norm`."""
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
        return (normed * scale.unsqueeze(1)).to(x.dtype)

    def gate_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        gate: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """See `Ops.gate_norm`."""
        total = torch.addcmul(x.float(), y.float(), gate.unsqueeze(1))
        if x.dtype == torch.float16:
            # As the model does: its residuals can leave float16's range.
            total = total.clamp(-65504, 65504)
        x.copy_(total)
        normed = F.layer_norm(total, x.shape[-1:], eps=eps)
        return (normed * scale.unsqueeze(1)).to(x.dtype)

    def turn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor, float],
        rope: torch.Tensor,
        target: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """See `Ops.turn`."""
        query_weight, key_weight, eps = norms
        target[0].copy_(_turned(key, key_weight, eps, rope))
        target[1].copy_(value)
        return _turned(query, query_weight, eps, rope).to(query.dtype)

    def swiglu(self, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `Ops.swiglu`."""
        return (F.silu(gate.float()) * value.float()).to(gate.dtype)


def _turned(x: torch.Tensor, weight: torch.Tensor, eps: float, rope: torch.Tensor) -> torch.Tensor:
    x = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.view_as_complex(rope).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2)


def choose_ops(device: torch.device, dtype: torch.dtype, width: int, head_dim: int) -> Ops | str:
    """The operations for a device and sizes, or why there are none.

    Parameters
    ----------
    device, dtype
        Of the step.
    width, head_dim
        Channels of a token, and of a head.

    Returns
    -------
    Ops or str
        On a GPU only Triton's: torch's own in float32 would be slower than the exact step.
    """
    if device.type != "cuda":
        return TorchOps()
    if torch.version.hip is not None:
        return "the Triton kernels have not been run on ROCm"
    if not has_triton():
        return "Triton is not installed"
    from .triton_ops import TritonOps, why_unusable

    return why_unusable(device, dtype, width, head_dim) or TritonOps()


def has_triton() -> bool:
    """Whether Triton is installed. CUDA builds of torch bring it on Linux."""
    return importlib.util.find_spec("triton") is not None
