"""How much device memory there is, and who may have it."""

from __future__ import annotations

import ctypes
import logging
import sys

import torch

logger = logging.getLogger("graph_cache")


def is_async_allocator() -> bool:
    """Whether torch allocates through cudaMallocAsync, as ComfyUI has it do."""
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def free_bytes(device: torch.device) -> int | None:
    """Memory of a device that nobody holds, in bytes, as the driver sees it.

    Parameters
    ----------
    device
        Any device; only CUDA devices are accounted for.

    Returns
    -------
    int or None
        None where memory is not accounted for (a CPU).
    """
    if device.type != "cuda":
        return None
    return torch.cuda.mem_get_info(device)[0]


def available_bytes(device: torch.device, graph_bytes: int = 0) -> int | None:
    """Memory that a new tensor can have: free, or cached by torch's allocator and unused.

    The cached part may be in pieces, so this is an upper bound; an allocation can still fail.

    Parameters
    ----------
    device
        Any device.
    graph_bytes
        Held by living graphs. torch's own allocator counts a graph's pool as unused, since
        everything born in a capture is freed in it, but no other tensor can have it.
    """
    free = free_bytes(device)
    if free is None:
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if not is_async_allocator():
        cached -= graph_bytes
    return free + max(0, cached)


def format_bytes(nbytes: int | float) -> str:
    """A size for people: ``512 KiB``, ``1,234 MiB``."""
    if nbytes < 10 * 2**20:
        return f"{nbytes / 2**10:,.0f} KiB"
    return f"{nbytes / 2**20:,.0f} MiB"


def trim_graph_memory(device: torch.device) -> None:
    """Return what the driver keeps of released graphs under cudaMallocAsync.

    Such graphs have their memory from a pool of the driver's own, which neither torch's
    ``empty_cache`` nor torch's API reaches (`cuDeviceGraphMemTrim` in the CUDA driver API).

    A driver that cannot do it is only logged: the memory stays usable for later graphs.
    """
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        get_device, trim = driver.cuDeviceGet, driver.cuDeviceGraphMemTrim
    except (OSError, AttributeError) as error:
        logger.warning("graph cache: no access to the CUDA driver: %s", error)
        return
    handle = ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    code = get_device(ctypes.byref(handle), index) or trim(handle)
    if code:
        logger.warning("graph cache: the CUDA driver did not trim graph memory: error %d", code)
