"""torch's process-wide settings that decide which kernels a step runs, and how they round."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch


def _float32_matmul() -> object:
    matmul = torch.backends.cuda.matmul
    # The older flag raises once the newer one has been set.
    return matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


_GETTERS: tuple[Callable[[], object], ...] = (
    _float32_matmul,
    lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    lambda: torch.backends.cuda.matmul.allow_fp16_accumulation,
    lambda: torch.backends.cuda.preferred_blas_library(),
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    lambda: torch.backends.cuda.cudnn_sdp_enabled(),
    lambda: tuple(torch._C._get_sdp_priority_order()),
    torch.are_deterministic_algorithms_enabled,
)


def numeric_settings() -> tuple[str, ...]:
    """The settings' values, for a key.

    A graph goes on with the kernels of its capture; the model's own path would follow a changed
    setting. Where a version of torch has no such setting, its place is empty.
    """
    _settle()
    return tuple(map(_read, _GETTERS))


_settled = False


def _settle() -> None:
    """Let torch choose its order of attention kernels, once in a process.

    On some GPUs it does so at the first attention of the process. If that is ours, the order
    would be another one right after the prefill's key was made.
    """
    global _settled
    if _settled or not torch.cuda.is_initialized():
        return
    _settled = True
    tensor = torch.empty(1, 1, 1, 64, dtype=torch.float16, device="cuda")
    with suppress(AttributeError, RuntimeError):
        torch._fused_sdp_choice(tensor, tensor, tensor)


def _read(getter: Callable[[], object]) -> str:
    try:
        return str(getter())
    except (AttributeError, RuntimeError):
        return ""
