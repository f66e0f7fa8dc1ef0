"""Several linear layers of one input as one matrix product, without a second copy of them.

The layers' parameters stay what they are for everybody else; only their memory is that of one
tensor from then on, row after row. Nothing here holds a weight: whoever replaces or moves one frees
its memory, and the layers run one by one until they are joined anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger("graph_cache")

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FusedLinear:
    """Linear layers of one input.

    Parameters
    ----------
    layers
        Gives them as they are now; a module may be replaced.

    Attributes
    ----------
    why_not
        Why the last `join` did not make them one; empty if it did.
    """

    def __init__(self, layers: Callable[[], Sequence[nn.Module]]) -> None:
        self._layers = layers
        self.why_not = "not joined yet"

    def join(self, storages: set[int]) -> bool:
        """Make the layers' weights rows of one tensor, where that can be and is not so already.

        Parameters
        ----------
        storages
            The address of a new tensor's memory is added to it, for `part`.

        Returns
        -------
        bool
            Whether memory was moved.
        """
        layers = self._layers()
        self.why_not = _obstacle(layers)
        if self.why_not or _as_one(layers) is not None:
            return False
        weights = [layer.weight for layer in layers]
        try:
            # A tensor that is born in inference mode would make the parameters such tensors.
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.cat([weight.detach() for weight in weights])
                _wait(whole)
                storages.add(whole.untyped_storage().data_ptr())
                for weight, rows in zip(weights, whole.split([len(w) for w in weights])):
                    weight.data = rows
        except torch.OutOfMemoryError:
            self.why_not = "no memory to join the weights"
            return False
        return True

    @property
    def one(self) -> bool:
        """Whether the layers run as one product now."""
        layers = self._layers()
        return not _obstacle(layers) and _as_one(layers) is not None

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What the layers give, ``(..., out_features)`` each; views of one tensor if joined."""
        layers = self._layers()
        whole = None if _obstacle(layers) else _as_one(layers)
        if whole is None:
            return [layer(x) for layer in layers]
        return list(F.linear(x, whole).split([len(layer.weight) for layer in layers], dim=-1))


def part(model: nn.Module, storages: set[int]) -> None:
    """Give every weight that lies in a joined tensor memory of its own again.

    Parameters
    ----------
    model
        Whose layers were joined.
    storages
        Addresses that `FusedLinear.join` has added; emptied.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            for weight in model.parameters():
                if weight.untyped_storage().data_ptr() in storages:
                    weight.data = weight.data.clone()
                    _wait(weight)
    except torch.OutOfMemoryError:
        logger.warning("graph cache: no memory to part joined weights; they stay joined")
    storages.clear()


def _wait(tensor: torch.Tensor) -> None:
    """Wait for a copy: what it read is about to be freed, and may be another stream's at once."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _as_one(layers: Sequence[nn.Module]) -> torch.Tensor | None:
    """The weights as one tensor, ``(sum of rows, in_features)``, if they lie row after row."""
    first = layers[0].weight
    at, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for layer in layers:
        weight = layer.weight
        if weight.untyped_storage().data_ptr() != storage or weight.storage_offset() != at:
            return None
        at += weight.numel()
    size = (sum(len(layer.weight) for layer in layers), first.shape[1])
    return first.detach().as_strided(size, (first.shape[1], 1))


def _obstacle(layers: Iterable[nn.Module]) -> str:
    """What speaks against one product of these layers; empty if nothing does."""
    first = None
    for layer in layers:
        if type(layer) is not nn.Linear or layer.bias is not None:
            return f"a layer of type {type(layer).__name__}"
        if "forward" in vars(layer) or layer._forward_hooks or layer._forward_pre_hooks:
            return "hooks on a layer"
        weight = layer.weight
        first = weight if first is None else first
        if type(weight) is not nn.Parameter or weight.dtype not in _DTYPES:
            return f"weights of type {type(weight).__name__}, {weight.dtype}"
        if weight.is_inference() or not weight.is_contiguous():
            return "weights that cannot be moved"
        if (weight.dtype, weight.device, weight.shape[1]) != (
            first.dtype,
            first.device,
            first.shape[1],
        ):
            return "weights that differ in type, place or width"
    return ""
