"""A fast step's elementwise operations against the same in float64, on any device.

Run as a program, it checks the Triton kernels: on a GPU, or in Triton's interpreter where
TRITON_INTERPRET is set before Triton is imported.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

from graph_cache.fast.ops import Ops, TorchOps

EPS = 1e-6
SHAPES = {
    "one token": (1, 1, 2, 64),
    "batch": (2, 5, 3, 128),
    "more heads than a program turns": (1, 4, 11, 32),
    "as the 7 B model": (1, 3, 32, 128),
}
"""Batch, tokens, heads, channels a head."""
BOUND = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Of the relative difference: rounding of results alone."""


def check(ops: Ops, dtype: torch.dtype, shape: tuple, device: str, bound: float) -> None:
    """Every operation; raises AssertionError with its name."""
    batch, tokens, heads, head_dim = shape
    width = heads * head_dim
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    def close(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.dtype == dtype, f"{name}: {found.dtype}"
        assert found.shape == expected.shape, f"{name}: {tuple(found.shape)}"
        away = ((found.double() - expected).norm() / expected.norm()).item()
        assert away <= bound, f"{name}: {away:.1e} from float64 in {dtype} at {shape}"

    # A mean far from 0: what a variance of squares would lose.
    x, y = drawn(batch, tokens, width) + 30, drawn(batch, tokens, width)
    gate, scale = (drawn(batch, width, dtype=torch.float32) for _ in range(2))

    def normed(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=EPS) * scale.double().unsqueeze(1)

    close("norm", ops.norm(x, scale, EPS), normed(x.double()))
    total = x.double() + y.double() * gate.double().unsqueeze(1)
    close("norm of a sum", ops.gate_norm(x, y, gate, scale, EPS), normed(total))
    close("sum in place", x, total)

    # Views of one product, and buffers with room for a prefix, as in a step.
    whole = drawn(batch, tokens, 3 * width)
    query, key, value = (p.unflatten(-1, (heads, head_dim)) for p in whole.split(width, dim=-1))
    weights = drawn(head_dim), drawn(head_dim)
    angles = drawn(tokens, head_dim // 2, dtype=torch.float32)
    rope = torch.stack([angles.cos(), angles.sin()], dim=-1).contiguous()
    buffers = [torch.full((batch, 3 + tokens, heads, head_dim), 7.0).to(query) for _ in "kv"]
    target = tuple(buffer[:, 3:] for buffer in buffers)

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x.double(), (head_dim,), weight.double(), EPS)
        turns = torch.view_as_complex(rope.double()).unsqueeze(1)
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(
            3
        )

    found = ops.turn(query, key, value, (*weights, EPS), rope, target)
    close("query", found, turned(query, weights[0]))
    close("key", target[0], turned(key, weights[1]))
    assert torch.equal(target[1], value), "value"
    assert all((buffer[:, :3] == 7).all() for buffer in buffers), "the prefix was written to"
    assert found.is_contiguous(), "query"

    # A row that one program does not compute alone.
    first, second = drawn(batch, tokens, 2 * 2500).split(2500, dim=-1)
    close("swiglu", ops.swiglu(first, second), F.silu(first.double()) * second.double())


def check_float16_range(ops: Ops, device: str) -> None:
    """A residual stream that leaves float16's range is clipped, as the model does."""
    x = torch.full((1, 1, 64), 60000.0, dtype=torch.float16, device=device)
    gate = torch.ones(1, 64, device=device)
    normed = ops.gate_norm(x, x.clone(), gate, gate, EPS)
    assert (x == 65504).all(), x
    assert torch.isfinite(normed).all()


def main(device: str) -> int:
    """Check the Triton kernels."""
    from graph_cache.fast.triton_ops import TritonOps

    for dtype, bound in BOUND.items():
        for shape in SHAPES.values():
            # The interpreter cuts bfloat16 off instead of rounding it.
            slack = 2 if device == "cpu" else 1
            check(TritonOps(), dtype, shape, device, slack * bound)
    check_float16_range(TritonOps(), device)
    print("all kernels are right")
    return 0


def check_torch(dtype: torch.dtype, shape: tuple, device: str) -> None:
    """Check torch's own operations."""
    check(TorchOps(), dtype, shape, device, BOUND[dtype])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
