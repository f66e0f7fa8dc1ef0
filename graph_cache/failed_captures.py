"""What a failed capture leaves behind, and how the process survives it."""

from __future__ import annotations

import ctypes
import logging
import traceback
from collections.abc import Iterable, Iterator

import torch

from .errors import first_line
from .memory import is_async_allocator

logger = logging.getLogger("graph_cache")

no_more: dict[torch.device, str] = {}
"""Devices on which this process cannot capture any more, and what went wrong there."""


def clean_up(
    error: BaseException, device: torch.device, pool: tuple[int, int], ours: set[int]
) -> None:
    """Leave a process that works behind a failed capture.

    torch ends the capture first and tells the allocator then. If the first raises, the allocator
    believes in a capture for ever: under cudaMallocAsync it frees no memory any more. So it is
    told here (`_cuda_endAllocateToPool` is what torch's own memory pools use).

    Under cudaMallocAsync, what the failed capture has allocated exists in the abandoned graph
    alone: it holds no memory, but freeing it is an error, and an error in a tensor's destructor
    aborts. So it is never freed. The driver may hand its addresses out again, at which the
    allocator stumbles in the next capture; so there is none.

    Parameters
    ----------
    error
        What ended the capture; the tensors that were alive are in the frames of its traceback.
    device, pool
        Of the capture.
    ours
        Addresses of memory that was allocated before, and must not be kept.
    """
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        try:
            end(device.index, pool)
        except RuntimeError as told:
            # The usual case: the capture was ended properly.
            logger.debug("graph cache: %s", told)
    if is_async_allocator():
        cause: BaseException | None = error
        while cause is not None:
            for frame, _ in traceback.walk_tb(cause.__traceback__):
                for tensor in _tensors(frame.f_locals.values()):
                    if tensor.is_cuda and tensor.untyped_storage().data_ptr() not in ours:
                        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
            cause = cause.__context__
        no_more[device] = (
            f"{type(error).__name__}: {first_line(error)} (no more captures in this process)"
        )


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """Tensors among local variables, those in sequences and mappings too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
