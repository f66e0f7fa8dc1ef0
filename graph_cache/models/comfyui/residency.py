"""Whether a model's weights are on the device now, and whether they will stay for a replay.

With DynamicVRAM a weight has a fixed virtual address, and the memory behind it can be taken away
whenever somebody else allocates. A replay over memory that is gone is an illegal access; so every
range is pinned from the check until the replay is enqueued. A range also has a signature, which
changes when its memory is taken away: the content is gone then, even if memory is there again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...reasons import Fallback
from . import core

Range = tuple[Any, int, int]


class Residency:
    """The weights of one model.

    Parameters
    ----------
    model
        The native transformer.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ranges: list[Range] = []
        self._modules: list[nn.Module] = []
        self._tensors: list[tuple[dict[str, torch.Tensor | None], str]] = []
        self._identity: tuple[int, ...] = ()
        self._signatures: tuple[bytes, ...] = ()
        self._loaded: tuple[bytes, ...] | None = None
        self.complete = False
        """Whether every weight was on the device when `resident` last looked."""

    @property
    def dynamic(self) -> bool:
        """Whether DynamicVRAM manages weights of the model."""
        return bool(self._ranges)

    def refresh(self) -> None:
        """Look at the model anew: a library may have loaded or replaced weights since."""
        modules = list(self._model.modules())
        self._identity = tuple(map(id, modules))
        self._modules = [module for module in modules if getattr(module, "_v", None) is not None]
        # One range covers a block's weights; the others have one each.
        blocks = [
            block
            for block in self._model.transformer_blocks
            if getattr(block, "_v_block", None) is not None
        ]
        covered = {id(module) for block in blocks for module in block.modules()}
        self._ranges = [block._v_block for block in blocks]
        self._ranges += [module._v for module in self._modules if id(module) not in covered]
        self._loaded = None
        self.complete = False
        managed = {id(module) for module in self._modules}
        self._tensors = [
            (container, name)
            for module in modules
            for container in (module._parameters, module._buffers)
            for name, tensor in container.items()
            # A managed module's weight and bias are used from its range, wherever they lie.
            if tensor is not None and not (id(module) in managed and name in ("weight", "bias"))
        ]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Weights that are used from where they lie, not from a range."""
        for container, name in self._tensors:
            yield container[name]

    def fingerprint(self) -> tuple:
        """Modules, addresses and ranges, with the signatures of the last `resident`."""
        addresses = [pointer for tensor in self.tensors() for pointer in addresses_of(tensor)]
        ranges = tuple((id(vbar), start, size) for vbar, start, size in self._ranges)
        return (self._identity, tuple(addresses), ranges, self._signatures)

    @contextmanager
    def resident(self) -> Iterator[Fallback | None]:
        """Pin every range; yields None, or why the weights cannot be relied on."""
        if not self._ranges:
            # Outside DynamicVRAM a weight is where it is; `weight_fallbacks` has looked.
            yield None
            return
        vbar, pinned, signatures = core.vbar(), [], []
        try:
            for allocation in self._ranges:
                signature = vbar.vbar_fault(allocation)
                if signature is None:
                    break
                pinned.append(allocation)
                signatures.append(bytes(signature))
            away = self._missing(tuple(signatures))
            self.complete = away is None
            if away is not None:
                # Whoever computes now needs the freedom to move weights.
                _unpin(vbar, pinned)
                pinned = []
            yield away
        finally:
            _unpin(vbar, pinned)

    def _missing(self, signatures: tuple[bytes, ...]) -> Fallback | None:
        if len(signatures) < len(self._ranges):
            return Fallback(
                "weights_streamed", f"{len(signatures)} of {len(self._ranges)} parts on the device"
            )
        self._signatures = signatures
        if self._loaded != signatures:
            # Memory is there; the content is what each module has loaded into it, or nothing.
            vbar = core.vbar()
            empty = sum(not _is_loaded(vbar, module) for module in self._modules)
            if empty:
                return Fallback(
                    "weights_streamed", f"{empty} of {len(self._modules)} weights to be loaded"
                )
            self._loaded = signatures
        return None


def _unpin(vbar: Any, allocations: list[Range]) -> None:
    for allocation in allocations:
        vbar.vbar_unpin(allocation)


def _is_loaded(vbar: Any, module: nn.Module) -> bool:
    signature = vbar.vbar_fault(module._v)
    if signature is None:
        return False
    try:
        return vbar.vbar_signature_compare(signature, getattr(module, "_v_signature", None))
    finally:
        vbar.vbar_unpin(module._v)


def addresses_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Addresses of a tensor's memory; of all its parts, where it is a quantised one."""
    return tuple(part.data_ptr() for part in parts_of(tensor))


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from parts_of(getattr(tensor, name))
