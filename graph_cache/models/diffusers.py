"""Adapter for diffusers' `QwenImage21Transformer2DModel`, as `QwenImage21Pipeline` calls it.

The pipeline gives every conditioning its own `QwenImage21KVCache`, fills it at its first step
(``kv_cache_mode="extract"``) and decodes from it at all later ones (``"cached"``). That object is
our conditioning: it is compared by identity, so no prompt is ever compared and nothing waits for
the GPU.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21KVCache,
    QwenImage21Transformer2DModel,
)

from ..capture import StaticInputs
from ..eligibility import is_tuner, lora_fallback
from ..entries import Entry
from ..fast import FastModel, part
from ..layout import SequenceLayout, grid_tokens
from ..prefix import PrefixBuffers, PrefixShape
from ..reasons import Fallback
from . import diffusers_fast, diffusers_step
from .base import ModelCall, Phase
from .diffusers_checks import (
    HOOK_NAME,
    CallChecks,
    attention_backends,
    model_fallbacks,
)
from .diffusers_prefix import PrefixSink

_TOKENS_PER_SLOT = 4
"""Latent tokens that one image slot of the vision-language sequence stands for (2 x 2)."""

_PHASES = {None: Phase.UNCACHED, "extract": Phase.PREFILL, "cached": Phase.DECODE}


class _Hook(ModelHook):
    """Routes the model's calls to the manager; `fn_ref` is set by diffusers' registry."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter: DiffusersAdapter | None = None
        self.handle: Callable[[ModelCall], Any] | None = None

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        native = self.fn_ref.original_forward
        if self.handle is None or torch.compiler.is_compiling():
            return native(*args, **kwargs)
        call = self.adapter.read_call(native, args, kwargs)
        # A call that the model itself would reject gets the model's own error.
        return native(*args, **kwargs) if call is None else self.handle(call)


class DiffusersAdapter:
    """See `graph_cache.models.base.Adapter`.

    Parameters
    ----------
    model
        The transformer.
    """

    name = "diffusers"

    def __init__(self, model: QwenImage21Transformer2DModel) -> None:
        self.model = model
        self._weights: list[tuple[dict[str, torch.Tensor], str]] = []
        self._modules: tuple[int, ...] = ()
        self._tuners: list[torch.nn.Module] = []
        # Looked up once a prefill: a module finds its children slowly, and this is asked each step.
        self._attentions: list[torch.nn.Module] = []
        self._fast: FastModel | None = None
        self._joined: set[int] = set()
        self._hook: _Hook | None = None
        self._forward: Callable[..., Any] | None = None
        self._signature = inspect.signature(functools.partial(type(model).forward, model))
        named = [
            parameter
            for parameter in self._signature.parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        self._defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self._required = {p.name for p in named if p.default is p.empty}
        self._checks = CallChecks(model)
        self._found: tuple[bool, bool] | None = None

    # --- the door --------------------------------------------------------------------------

    def attach(self, handle: Callable[[ModelCall], Any]) -> None:
        """Register a diffusers hook; raises ValueError if one of ours is in use already."""
        found = "_diffusers_hook" in vars(self.model), "forward" in vars(self.model)
        registry = HookRegistry.check_if_exists_or_initialize(self.model)
        hook = registry.get_hook(HOOK_NAME)
        if hook is None:
            hook = _Hook()
            registry.register_hook(hook, HOOK_NAME)
        elif hook.handle is not None:
            raise ValueError("a graph cache is attached to this model already; detach it first")
        hook.adapter, hook.handle = self, handle
        self._hook, self._found, self._forward = hook, found, vars(self.model)["forward"]

    def detach(self) -> None:
        try:
            self._leave()
        finally:
            self._fast = None
            part(self.model, self._joined)

    def _leave(self) -> None:
        had_registry, had_forward = self._found
        registry = self.model._diffusers_hook
        self._hook.adapter = self._hook.handle = None
        if (
            vars(self.model).get("forward") is not self._forward
            or registry.hooks.get(HOOK_NAME) is not list(registry.hooks.values())[-1]
        ):
            # Somebody has wrapped the model since. Taking ours out from below would take theirs
            # along, so it stays and lets every call through.
            return
        registry.remove_hook(HOOK_NAME, recurse=False)
        if not registry.hooks:
            # diffusers leaves the bound method on the instance, and its empty registry.
            if not had_forward:
                vars(self.model).pop("forward", None)
            if not had_registry:
                del self.model._diffusers_hook

    def read_call(self, native: Callable[..., Any], args: tuple, kwargs: dict) -> ModelCall | None:
        """A call in the manager's terms; None if its arguments are not the model's."""
        if args or not self._required <= kwargs.keys() <= self._defaults.keys() | self._required:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError:
                return None
            names = list(self._signature.parameters)
            kwargs = {**dict(zip(names, bound.args)), **bound.kwargs}
        arguments = {**self._defaults, **kwargs}
        hidden, kv_cache = arguments["hidden_states"], arguments["kv_cache"]
        mode = arguments["kv_cache_mode"]
        if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
            return None
        if mode is not None and not isinstance(mode, str):
            return None
        if (kv_cache is None) != (mode is None) or mode not in _PHASES:
            return None

        def run_native(**replaced: Any) -> Any:
            return native(**{**arguments, **replaced})

        return ModelCall(
            phase=_PHASES[mode],
            # Only the pipeline's own cache is known to be compared by identity.
            conditioning=kv_cache if type(kv_cache) is QwenImage21KVCache else None,
            device=hidden.device,
            dtype=hidden.dtype,
            batch=hidden.shape[0],
            strides=hidden.stride(),
            arguments=arguments,
            run_native=run_native,
        )

    # --- what stops us ---------------------------------------------------------------------

    def fallbacks(self, call: ModelCall | None) -> Iterable[Fallback]:
        native = self._hook.fn_ref.original_forward
        return model_fallbacks(self.model, native, None if call is None else call.device)

    def call_fallback(self, call: ModelCall) -> Fallback | None:
        for layer in self._tuners:
            # Adapters can be switched on between two steps.
            stop = lora_fallback(layer)
            if stop is not None:
                return stop
        return self._checks.fallback(call)

    def attention(self, call: ModelCall) -> str:
        return ",".join(attention_backends(self._attentions))

    # --- the fast profile ------------------------------------------------------------------

    def prepare_fast(self, call: ModelCall) -> Fallback | None:
        attention = self.attention(call)
        made = diffusers_fast.fast_model(self.model, call.device, call.dtype, attention)
        if isinstance(made, str):
            return Fallback("profile_exact", made)
        made.join(self._joined)
        self._fast = made
        return None

    def kernels(self) -> dict[str, str]:
        return self._fast.kernels

    # --- layout and buffers ----------------------------------------------------------------

    def layout(self, call: ModelCall) -> SequenceLayout | Fallback:
        # One host sync, at the prefill only. The model reads the layout from the first row too.
        slots = call.arguments["img_mask"][0].tolist()
        grids = [tuple(grid) for grid in call.arguments["img_shapes"][0]]
        runs, cursor = [], 0
        for grid in grids:
            tokens = grid_tokens(grid)
            run = 0
            while cursor < len(slots) and not slots[cursor]:
                run, cursor = run + 1, cursor + 1
            group = tokens // _TOKENS_PER_SLOT
            if tokens % _TOKENS_PER_SLOT or not all(slots[cursor : cursor + group]):
                return Fallback("layout_unsupported", f"no image slots for a grid of {grid}")
            cursor += group
            runs.append(run)
        if not grids or cursor != len(slots):
            return Fallback("layout_unsupported", "the target image is not the last")
        try:
            return SequenceLayout(tuple(runs), tuple(grids[:-1]), grids[-1])
        except ValueError as error:
            return Fallback("layout_unsupported", str(error))

    def prefix_shape(self, call: ModelCall, layout: SequenceLayout) -> PrefixShape:
        config = self.model.config
        return PrefixShape(
            layers=len(self.model.transformer_blocks),
            batch=call.batch,
            prefix=layout.prefix_tokens,
            target=layout.target_tokens,
            heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            dtype=call.dtype,
        )

    def static_inputs(self, call: ModelCall, layout: SequenceLayout) -> StaticInputs:
        return diffusers_step.static_inputs(self.model, call.arguments["hidden_states"], layout)

    def run_values(self, call: ModelCall, layout: SequenceLayout) -> Mapping[str, torch.Tensor]:
        return {"rope": diffusers_step.target_rope(self.model, layout, call.device)}

    def step_values(self, call: ModelCall, layout: SequenceLayout) -> Mapping[str, torch.Tensor]:
        return {
            "hidden": call.arguments["hidden_states"][:, -layout.target_tokens :],
            "timestep": call.arguments["timestep"],
        }

    # --- the two phases --------------------------------------------------------------------

    def prefill(self, call: ModelCall, buffers: PrefixBuffers) -> tuple[Any, Fallback | None]:
        output = call.run_native(kv_cache=PrefixSink(buffers))
        for index, layer in enumerate(call.conditioning.layer_caches):
            layer.store(*buffers.prefix(index))
        return output, None

    def settle(self) -> None:
        """The pipeline's K/V cache holds views of our buffers, so there is nothing to let go of."""

    def part(self, conditioning: QwenImage21KVCache) -> None:
        for layer in conditioning.layer_caches:
            if layer.k is not None and layer.k.untyped_storage().nbytes() > layer.k.nbytes:
                # A view into [prefix | target] would keep the target's room too.
                layer.store(layer.k.clone(), layer.v.clone())

    def decode_fallback(self, call: ModelCall, entry: Entry) -> Fallback | None:
        layout, arguments = entry.key.layout, call.arguments
        tokens = layout.reference_tokens + layout.target_tokens
        hidden = arguments["hidden_states"]
        if call.batch != entry.key.batch or hidden.shape[1] != tokens:
            return Fallback("layout_changed", f"hidden states of {tuple(hidden.shape)}")
        if call.strides != entry.key.strides:
            return Fallback("layout_changed", f"hidden states with strides {call.strides}")
        if call.dtype != entry.key.dtype or call.device != entry.key.device:
            return Fallback("layout_changed", f"{call.dtype} on {call.device}")
        grids = tuple(map(tuple, arguments["img_shapes"][0]))
        if grids != (*layout.references, layout.target):
            return Fallback("layout_changed", f"img_shapes {grids}")
        slots = sum(layout.text_runs) + tokens // _TOKENS_PER_SLOT
        if tuple(arguments["img_mask"].shape[1:]) != (slots,):
            return Fallback("layout_changed", f"img_mask of {tuple(arguments['img_mask'].shape)}")
        if tuple(arguments["timestep"].shape) != (call.batch,):
            return Fallback("layout_changed", f"timestep of {tuple(arguments['timestep'].shape)}")
        for index, layer in enumerate(call.conditioning.layer_caches):
            key, value = entry.buffers.prefix(index)
            if layer.k is not key or layer.v is not value:
                return Fallback("prefix_replaced")
        return None

    def body(self, call: ModelCall, entry: Entry) -> Callable[[], torch.Tensor]:
        if entry.key.profile == "fast":
            return functools.partial(
                diffusers_fast.step, self.model, self._fast, entry.inputs, entry.buffers
            )
        return functools.partial(diffusers_step.decode, self.model, entry.inputs, entry.buffers)

    def resident(self) -> AbstractContextManager[Fallback | None]:
        return nullcontext()

    def wrap(self, call: ModelCall, output: torch.Tensor) -> Any:
        if call.arguments["return_dict"]:
            return Transformer2DModelOutput(sample=output)
        return (output,)

    def reference(self, call: ModelCall) -> torch.Tensor | None:
        return call.run_native()[0]

    # --- weights ---------------------------------------------------------------------------

    def refresh_weights(self) -> None:
        modules = list(self.model.modules())
        self._modules = tuple(map(id, modules))
        self._attentions = [block.attn for block in self.model.transformer_blocks]
        self._tuners = [module for module in modules if is_tuner(module)]
        # The containers, not the tensors: a weight may be replaced, and no reference of ours may
        # keep the old one's memory.
        self._weights = [
            (container, name)
            for module in modules
            for container in (module._parameters, module._buffers)
            for name, tensor in container.items()
            if tensor is not None
        ]

    def weight_fallback(self, call: ModelCall) -> Fallback | None:
        """Nothing beyond what `fallbacks` has found at the prefill."""

    def weights(self) -> tuple:
        addresses = [container[name].data_ptr() for container, name in self._weights]
        return (self._modules, tuple(addresses))

    def recover(self) -> None:
        """Nothing of the model's own is left half-way."""

    def pending_bytes(self) -> int:
        return 0

    def make_room(self, nbytes: int, device: torch.device) -> None:
        """Nobody here manages the device's memory."""
