"""Errors in our own path: which are caught, and what becomes of them."""

from __future__ import annotations

import logging

import torch

from .reasons import Fallback

logger = logging.getLogger("graph_cache")

OWN_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
"""What our own path can raise on a model or a library that differs from what we know; the model's
own path then runs. Interrupts and errors of other kinds are not ours to catch."""


def first_line(error: BaseException) -> str:
    """First line of what first went wrong.

    A failing capture raises again while it is being closed, so the cause is at the end of the
    chain. Only text is kept: an exception object would keep its traceback's tensors alive.
    """
    while error.__context__ is not None:
        error = error.__context__
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether running out of device memory is what first went wrong."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__context__
    return False


def failure(error: BaseException) -> Fallback:
    """The reason that an error in our own path becomes; unexpected ones are logged in full."""
    if is_out_of_memory(error):
        return Fallback("vram", first_line(error))
    logger.warning("graph cache: our own path failed", exc_info=error)
    return Fallback("step_failed", first_line(error))
