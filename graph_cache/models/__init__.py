"""Adapters: all knowledge of a model, and of the library that runs it, lives here."""

from __future__ import annotations

from torch import nn

from ..eligibility import wrapper_fallback
from ..reasons import Fallback
from .base import Adapter


def adapter_for(model: nn.Module) -> Adapter | Fallback:
    """The adapter of a model, or why there is none.

    Parameters
    ----------
    model
        Any module. The libraries of models other than this one are not imported.

    Raises
    ------
    TypeError
        If it is no module at all.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a torch module such as pipe.transformer, got {type(model).__name__}"
        )
    wrapped = wrapper_fallback(model)
    if wrapped is not None:
        return wrapped
    for cls in type(model).__mro__:
        is_diffusers = cls.__module__.partition(".")[0] == "diffusers"
        if is_diffusers and cls.__name__ == "QwenImage21Transformer2DModel":
            from .diffusers import DiffusersAdapter

            return DiffusersAdapter(model)
    return Fallback("not_qwen21", type(model).__name__)
