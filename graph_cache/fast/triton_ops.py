"""A fast step's elementwise operations as Triton kernels: each reads and writes memory once.

Importable only where Triton is.
"""

from __future__ import annotations

import functools
from subprocess import SubprocessError
from typing import Any

import torch
import triton
from triton.runtime.errors import TritonError

from ..errors import first_line
from .triton_kernels import norm_kernel, swiglu_kernel, turn_kernel

_WIDEST = 16384
"""Channels of a row that one program holds in registers."""
_HEADS = 8
"""Heads of a token that one program turns."""
_COLUMNS = 2048
"""Channels of a row that one program of `swiglu` computes."""
_ERRORS = (TritonError, SubprocessError, OSError, ImportError, AssertionError)
"""What compiling a kernel can raise beside RuntimeError: no compiler, no room for its cache, a chip
or a driver that this Triton does not know."""


def fits(width: int, head_dim: int) -> bool:
    """Whether the kernels are made for these sizes."""
    return 32 <= width <= _WIDEST and head_dim >= 2 and head_dim & (head_dim - 1) == 0


@functools.cache
def why_unusable(device: torch.device, dtype: torch.dtype, width: int, head_dim: int) -> str:
    """Why the kernels cannot be used here; empty if they can: each has been run once then."""
    if not fits(width, head_dim):
        return f"no Triton kernels for {width} channels in heads of {head_dim}"
    ops = TritonOps()
    try:
        with torch.inference_mode(False), torch.no_grad():
            x = torch.ones(1, 2, width, dtype=dtype, device=device)
            scale = torch.ones(1, width, device=device)
            heads = x[..., : width // head_dim * head_dim].unflatten(-1, (-1, head_dim))
            rope = torch.ones(2, head_dim // 2, 2, device=device)
            ops.norm(x, scale, 1e-6)
            ops.gate_norm(x.clone(), x, scale, scale, 1e-6)
            weight = heads[0, 0, 0]
            target = (torch.empty_like(heads), torch.empty_like(heads))
            ops.turn(heads, heads, heads, (weight, weight, 1e-6), rope, target)
            ops.swiglu(x, x)
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return first_line(error)
    return ""


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Run a kernel; whatever Triton raises becomes a RuntimeError, as torch's own operations do."""
    try:
        kernel[grid](*arguments, **options)
    except _ERRORS as error:
        raise RuntimeError(f"Triton: {type(error).__name__}: {first_line(error)}") from error


class TritonOps:
    """See `graph_cache.fast.ops.Ops`."""

    name = "triton"

    def norm(self, x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Ops.norm`."""
        x = x.contiguous()
        return self._norm(x, x, scale, scale, eps, gated=False)

    def gate_norm(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        gate: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """See `Ops.gate_norm`."""
        if not x.is_contiguous():
            raise ValueError("x is changed in place and must be contiguous")
        return self._norm(x, y.contiguous(), gate, scale, eps, gated=True)

    def _norm(self, x, y, gate, scale, eps: float, gated: bool) -> torch.Tensor:
        batch, tokens, width = x.shape
        normed = torch.empty_like(x)
        _launch(
            norm_kernel,
            (batch * tokens,),
            x,
            y,
            gate.contiguous(),
            scale.contiguous(),
            normed,
            tokens,
            width,
            eps,
            gated=gated,
            clamped=x.dtype == torch.float16,
            block=triton.next_power_of_2(width),
            # Never more threads than channels: two would hold the same channel then, and one could
            # read x after the other has written it.
            num_warps=8 if width > 2048 else 4 if width >= 128 else 1,
        )
        return normed

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
        batch, tokens, heads, head_dim = query.shape
        query_weight, key_weight, eps = norms
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        block = min(_HEADS, triton.next_power_of_2(heads))
        _launch(
            turn_kernel,
            (batch * tokens, triton.cdiv(heads, block)),
            query,
            key,
            value,
            query_weight,
            key_weight,
            rope,
            out,
            *target,
            tokens,
            heads,
            eps,
            *(part for x in (query, key, value, out, *target) for part in x.stride()[:3]),
            head_dim=head_dim,
            block=block,
            num_warps=4,
        )
        return out

    def swiglu(self, gate: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """See `Ops.swiglu`."""
        batch, tokens, width = gate.shape
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        block = min(_COLUMNS, triton.next_power_of_2(width))
        _launch(
            swiglu_kernel,
            (batch * tokens, triton.cdiv(width, block)),
            gate,
            value,
            out,
            tokens,
            width,
            *gate.stride()[:2],
            *value.stride()[:2],
            block=block,
            num_warps=4,
        )
        return out
