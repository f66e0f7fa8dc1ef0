"""One call of ComfyUI's native model: whose conditioning it is, and whether that is still so.

ComfyUI calls the model with all conditionings' content at every step. What tells them apart are
the identities that a sampling run gives its conditionings (``transformer_options["uuids"]``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...reasons import Fallback
from ..base import ModelCall, Phase


@dataclass(eq=False)
class Conditioning:
    """One conditioning of a run, or several in one batch.

    Attributes
    ----------
    content
        Prompt embedding and reference latents of the prefill, until they have been compared.
    problem
        Why it cannot be trusted any more.
    """

    content: list[torch.Tensor] = field(repr=False)
    problem: Fallback | None = None


def read_call(
    run_native: Callable[[], Any],
    args: tuple,
    kwargs: dict,
    inner: str,
    known: dict[tuple, Conditioning],
) -> ModelCall:
    """A call of the model in the manager's terms.

    Parameters
    ----------
    run_native
        Runs the model's own path.
    args, kwargs
        As ComfyUI passes them.
    inner
        Names the wrappers that stand between us and the model; empty if there are none.
    known
        The run's conditionings by identity. A new one is added, and makes the call a prefill.
    """
    unknown = _unknown_arguments(args)
    if unknown:
        # The model's own path, but counted.
        return _unread(run_native, args, unknown)
    latent, timestep, context, references, slots, options = args
    references, slots = list(references or []), list(slots or [])
    arguments = {
        "latent": latent,
        "timestep": timestep,
        "context": context,
        "references": references,
        "slots": slots,
        "transformer_options": options,
        "further": kwargs,
        "inner_wrappers": inner,
        "unknown": "",
    }
    identity = (
        *(tuple(options.get("uuids", ())), tuple(options.get("cond_or_uncond", ()))),
        *(latent.shape, latent.dtype, latent.device, context.shape, context.dtype),
        *(tuple(reference.shape for reference in references), tuple(slots)),
    )
    conditioning = known.get(identity)
    phase = Phase.PREFILL if conditioning is None else Phase.DECODE
    if conditioning is None:
        conditioning = Conditioning([context, *references])
        known[identity] = conditioning
    return ModelCall(
        phase=phase,
        conditioning=conditioning,
        device=latent.device,
        dtype=latent.dtype,
        batch=latent.shape[0],
        strides=latent.stride(),
        arguments=arguments,
        run_native=run_native,
    )


def _unknown_arguments(args: tuple) -> str:
    """What about a call's positional arguments is not as ComfyUI passes them; empty if nothing."""
    if len(args) != 6 or not isinstance(args[5], dict):
        return f"the model is called with {len(args)} arguments"
    latent, _, context, *_ = args
    if not isinstance(latent, torch.Tensor) or latent.ndim != 4:
        return "latents are not of four dimensions"
    if not isinstance(context, torch.Tensor) or context.ndim != 3:
        return "the prompt is not of three dimensions"
    return ""


def _unread(run_native: Callable[[], Any], args: tuple, unknown: str) -> ModelCall:
    latent = next((value for value in args if isinstance(value, torch.Tensor)), torch.empty(0))
    return ModelCall(
        phase=Phase.UNCACHED,
        conditioning=None,
        device=latent.device,
        dtype=latent.dtype,
        batch=latent.shape[0] if latent.ndim else 1,
        strides=latent.stride(),
        arguments={"unknown": unknown, "transformer_options": {}},
        run_native=run_native,
    )


def content_changed(call: ModelCall, again: bool) -> Fallback | None:
    """Whether a conditioning's content is another one than at the prefill.

    ComfyUI's identities stand for the conditionings that a run was given, but other nodes can
    replace what is in them from step to step. So content is compared at the first decode step,
    and at every one where a node is in the run that could do that (``again``): a host sync each
    time.
    """
    conditioning, arguments = call.conditioning, call.arguments
    if call.phase is not Phase.DECODE or not conditioning.content:
        return None
    now = [arguments["context"], *arguments["references"]]
    changed = [
        index
        for index, (then, other) in enumerate(zip(conditioning.content, now))
        if not torch.equal(then, other)
    ]
    if changed or not again:
        conditioning.content = []
    if not changed:
        return None
    what = "the prompt" if 0 in changed else f"reference {changed[0]}"
    return Fallback("conditioning_changed", what)
