"""What one sampling run is, from the sampler's point of view, and what of it stands against us."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...reasons import Fallback

_CONTENT_WRAPPERS = (
    *("sampler_sample", "predict_noise", "calc_cond_batch", "apply_model", "diffusion_model"),
)
"""Kinds of wrappers through which another node can give a conditioning other content."""


@dataclass(frozen=True)
class RunContext:
    """What the sampler runs with.

    Attributes
    ----------
    patcher
        ComfyUI's ModelPatcher of the run.
    options
        Its ``model_options``.
    steps
        Steps of the schedule; None where they cannot be told.
    min_steps
        Fewer steps than these are not worth it.
    in_use
        Patchers that the sampler holds besides.
    own_key
        Name of our wrappers.
    core_sampler
        Whether what samples is ComfyUI's own.
    sampler
        Name of the sampling function.
    """

    patcher: Any
    options: Mapping[str, Any]
    steps: int | None
    min_steps: int
    in_use: tuple = ()
    own_key: str = ""
    core_sampler: bool = True
    sampler: str = ""

    @property
    def way(self) -> tuple[str, ...]:
        """How the run samples, as far as that decides what a step takes."""
        return (self.sampler, *sorted(map(str, self._foreign_wrappers())))

    def _foreign_wrappers(self) -> set[Any]:
        wrappers = self.options.get("transformer_options", {}).get("wrappers", {})
        return {
            key
            for kind in _CONTENT_WRAPPERS
            for key, listed in wrappers.get(kind, {}).items()
            if listed and key != self.own_key
        }

    def content_may_change(self) -> bool:
        """Whether anybody stands where a conditioning's content could be changed within a run.

        ComfyUI's own samplers never do that.
        """
        return (
            bool(self._foreign_wrappers())
            or "model_function_wrapper" in self.options
            or not self.core_sampler
        )


def run_fallbacks(context: RunContext) -> Iterator[Fallback]:
    """What holds for a whole run, from the sampler's point of view."""
    patcher, options = context.patcher, context.options
    if context.steps is not None and context.steps < context.min_steps:
        yield Fallback("short_run", f"{context.steps} steps, min_steps={context.min_steps}")
    hooks = getattr(patcher, "hook_patches", None) or getattr(patcher, "forced_hooks", None)
    if hooks or options.get("registered_hooks"):
        yield Fallback("weight_hooks")
    if getattr(patcher, "injections", None):
        yield Fallback("injections", ", ".join(map(str, patcher.injections)))
    if getattr(patcher, "weight_wrapper_patches", None):
        yield Fallback("weight_wrappers", some(patcher.weight_wrapper_patches))
    patched = [key for key in getattr(patcher, "object_patches", ()) if _concerns_model(key)]
    if patched:
        yield Fallback("object_patches", some(patched))
    wrappers = options.get("transformer_options", {}).get("wrappers", {})
    if "torch.compile" in _keys(wrappers) or "torch_compile_kwargs" in options:
        yield Fallback("compiled", "by a node")
    if options.get("multigpu_clones"):
        yield Fallback("multi_gpu", f"{len(options['multigpu_clones'])} devices")


def _keys(wrappers: Mapping[str, Mapping[str, Any]]) -> set[Any]:
    return {key for by_key in wrappers.values() for key, listed in by_key.items() if listed}


def _concerns_model(key: str) -> bool:
    return key.startswith("diffusion_model")


def some(names: Iterable[Any]) -> str:
    """The first few of many names."""
    listed = list(map(str, names))
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
