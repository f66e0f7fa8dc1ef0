"""Adapter for ComfyUI's native `QwenImage21Transformer2DModel`."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...capture import StaticInputs
from ...entries import Entry
from ...fast import FastModel
from ...layout import SequenceLayout
from ...prefix import PrefixBuffers, PrefixShape
from ...reasons import Fallback
from ..base import ModelCall
from . import core, fast_step, step
from .calls import Conditioning, content_changed, read_call
from .checks import (
    attention_fallbacks,
    attention_is_known,
    attention_names,
    call_fallback,
    describe_weights,
    model_fallbacks,
    weight_fallbacks,
)
from .prefill import PrefixTap
from .residency import Residency
from .run_context import RunContext, run_fallbacks

_NOT_FOR_A_STEP = ("wrappers", "callbacks")
"""Entries of ``transformer_options`` that no block reads and no graph should keep alive."""


class ComfyUIAdapter:
    """See `graph_cache.models.base.Adapter`.

    Parameters
    ----------
    model
        The native transformer.
    """

    name = "comfyui"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._handle: Callable[[], Callable[[ModelCall], Any] | None] = lambda: None
        self._residency = Residency(model)
        self._context: RunContext | None = None
        self._watch_content = True
        self._device: torch.device | None = None
        self._fast: FastModel | None = None
        self._conditionings: dict[tuple, Conditioning] = {}

    # --- the door --------------------------------------------------------------------------

    def attach(self, handle: Callable[[ModelCall], Any]) -> None:
        """Where `receive` sends calls; ComfyUI's model itself is not touched."""
        # Weak: a cycle would keep the model's weights until some collection of garbage.
        self._handle = weakref.WeakMethod(handle)

    def detach(self) -> None:
        self._handle = lambda: None
        self.end_run()

    def begin_run(self, context: RunContext) -> None:
        """Open a sampling run."""
        self._context = context
        self._watch_content = context.content_may_change()
        self._conditionings.clear()

    def end_run(self) -> None:
        """Close it: whatever belonged to it may go."""
        self._context = None
        self._conditionings.clear()

    @property
    def planned_steps(self) -> int | None:
        """Steps of the run's schedule."""
        return None if self._context is None else self._context.steps

    def workload(self) -> tuple:
        """Tells runs apart whose steps are not comparable; prompts of any length are."""
        sizes = [(latent, references) for _, _, latent, *_, references, _ in self._conditionings]
        way = () if self._context is None else self._context.way
        return (self.describe_weights(), *way, *sorted(map(str, sizes)))

    def describe_weights(self) -> str:
        """Type of the blocks' weights, and who holds them."""
        return describe_weights(self.model, self._residency)

    def weights_place(self) -> str:
        """Where the weights were in the last run: resident, streamed, or empty if nobody looked.

        Ranges of DynamicVRAM are not asked again for this: that would bring memory to them.
        """
        if self._residency.dynamic:
            return "resident" if self._residency.complete else ""
        away = weight_fallbacks(self.model, self._residency, self._device)
        return "streamed" if "weights_streamed" in {one.code for one in away} else "resident"

    def receive(self, native: Callable[..., Any], args: tuple, kwargs: dict, inner: str) -> Any:
        """Take one call of the model.

        Parameters
        ----------
        native
            Runs the model's own path.
        args, kwargs
            As ComfyUI passes them.
        inner
            Names the wrappers that stand between us and the model; empty if there are none.
        """
        handle = self._handle()
        if handle is None:
            return native(*args, **kwargs)

        def run_native() -> Any:
            return native(*args, **kwargs)

        call = read_call(run_native, args, kwargs, inner, self._conditionings)
        self._device = call.device
        return handle(call)

    # --- what stops us ---------------------------------------------------------------------

    def fallbacks(self, call: ModelCall | None) -> Iterable[Fallback]:
        if self._context is not None:
            yield from run_fallbacks(self._context)
        self._residency.refresh()
        device = None if call is None else call.device
        yield from model_fallbacks(self.model, self._residency, device)
        if call is not None:
            yield from attention_fallbacks(self.model, call.arguments["transformer_options"])

    def call_fallback(self, call: ModelCall) -> Fallback | None:
        conditioning = call.conditioning
        if conditioning is None:
            return call_fallback(call.arguments)
        if conditioning.problem is None:
            conditioning.problem = content_changed(call, again=self._watch_content)
        return conditioning.problem or call_fallback(call.arguments)

    def attention(self, call: ModelCall) -> str:
        return ",".join(attention_names(self.model, call.arguments["transformer_options"]))

    def prepare_fast(self, call: ModelCall) -> Fallback | None:
        names = set(attention_names(self.model, call.arguments["transformer_options"]))
        made = fast_step.fast_model(self.model, call.device, call.dtype, names)
        if isinstance(made, str):
            return Fallback("profile_exact", made)
        self._fast = made
        return None

    def kernels(self) -> dict[str, str]:
        return self._fast.kernels

    # --- layout and buffers ----------------------------------------------------------------

    def layout(self, call: ModelCall) -> SequenceLayout | Fallback:
        text = call.arguments["context"].shape[1]
        grids = [(1, *map(int, image.shape[-2:])) for image in call.arguments["references"]]
        target = (1, *map(int, call.arguments["latent"].shape[-2:]))
        # As the model completes and cuts them.
        slots = [*call.arguments["slots"], *[text] * len(grids)][: len(grids)]
        bounds = [0, *slots, text]
        runs = tuple(end - start for start, end in itertools.pairwise(bounds))
        try:
            layout = SequenceLayout(runs, tuple(grids), target)
        except ValueError as error:
            return Fallback("layout_unsupported", str(error))
        if not layout.prefix_tokens:
            return Fallback("layout_unsupported", "no text and no references")
        return layout

    def prefix_shape(self, call: ModelCall, layout: SequenceLayout) -> PrefixShape:
        blocks = self.model.transformer_blocks
        heads = blocks[0].attn.heads
        return PrefixShape(
            layers=len(blocks),
            batch=call.batch,
            prefix=layout.prefix_tokens,
            target=layout.target_tokens,
            heads=heads,
            head_dim=self.model.inner_dim // heads,
            dtype=call.dtype,
        )

    def static_inputs(self, call: ModelCall, layout: SequenceLayout) -> StaticInputs:
        arguments = call.arguments
        return step.static_inputs(arguments["latent"], arguments["timestep"], self._rope(call))

    def run_values(self, call: ModelCall, layout: SequenceLayout) -> Mapping[str, torch.Tensor]:
        return {"rope": self._rope(call)}

    def _rope(self, call: ModelCall) -> torch.Tensor:
        names = ("latent", "context", "references", "slots")
        return step.target_rope(self.model, *(call.arguments[name] for name in names))

    def step_values(self, call: ModelCall, layout: SequenceLayout) -> Mapping[str, torch.Tensor]:
        return {name: call.arguments[name] for name in ("latent", "timestep")}

    # --- the two phases --------------------------------------------------------------------

    def prefill(self, call: ModelCall, buffers: PrefixBuffers) -> tuple[Any, Fallback | None]:
        # What the model keeps of a conditioning with the same content would be used instead of
        # being computed, and the tap would see nothing.
        self.settle()
        with PrefixTap(self.model.transformer_blocks, buffers) as tap:
            output = call.run_native()
        return output, Fallback("structure_unknown", tap.problem) if tap.problem else None

    def settle(self) -> None:
        """Drop the model's own copies; it makes another where it has to decode itself."""
        if self.model.prefix_cache is not None:
            self.model.reset_prefix_cache(self.model.prefix_cache_enabled)

    def decode_fallback(self, call: ModelCall, entry: Entry) -> Fallback | None:
        # All else is part of the conditioning's identity.
        if call.strides != entry.key.strides:
            return Fallback("layout_changed", f"latents with strides {call.strides}")
        timestep = call.arguments["timestep"]
        if tuple(timestep.shape) != (call.batch,):
            return Fallback("layout_changed", f"timestep of {tuple(timestep.shape)}")
        return None

    def body(self, call: ModelCall, entry: Entry) -> Callable[[], torch.Tensor]:
        given = call.arguments["transformer_options"]
        options = {name: value for name, value in given.items() if name not in _NOT_FOR_A_STEP}
        if entry.key.profile == "fast":
            return functools.partial(
                fast_step.step,
                self.model,
                self._fast,
                entry.inputs,
                entry.buffers,
                options,
                self._residency,
            )
        return functools.partial(
            step.decode,
            self.model,
            entry.inputs,
            entry.buffers,
            options,
            self._residency,
            lend=attention_is_known(self.model, options),
        )

    def wrap(self, call: ModelCall, output: torch.Tensor) -> torch.Tensor:
        return output

    def reference(self, call: ModelCall) -> torch.Tensor | None:
        output = call.run_native()
        # Without room for its cache the model computes the whole sequence again.
        cache = self.model.prefix_cache
        served = cache is not None and getattr(cache, "slot", cache) is not None
        return output if served else None

    def part(self, conditioning: object) -> None:
        """The model keeps no prefix of ours."""

    # --- weights ---------------------------------------------------------------------------

    def refresh_weights(self) -> None:
        """`fallbacks` has just done it."""

    def resident(self) -> AbstractContextManager[Fallback | None]:
        return self._residency.resident()

    def weight_fallback(self, call: ModelCall) -> Fallback | None:
        found = weight_fallbacks(self.model, self._residency, call.device)
        return next((fallback for fallback in found), None)

    def weights(self) -> tuple:
        return self._residency.fingerprint()

    def recover(self) -> None:
        core.clean_up_after_error()

    def pending_bytes(self) -> int:
        patcher = None if self._context is None else self._context.patcher
        if patcher is None or not getattr(patcher, "is_dynamic", bool)():
            return 0
        # DynamicVRAM brings weights as they are used, the first time during the prefill.
        return max(0, int(patcher.model_size() - patcher.loaded_size()))

    def make_room(self, nbytes: int, device: torch.device) -> None:
        if self._context is not None:
            core.free_others(nbytes, device, (self._context.patcher, *self._context.in_use))
