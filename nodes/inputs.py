"""Inputs and texts that several nodes share."""

from __future__ import annotations

import inspect
from typing import Any

from comfy_api.latest import io

CATEGORY = "model/qwen image 2.1"
SEARCH_ALIASES = ["qwen", "cuda graph", "kv cache", "speed up", "accelerate", "faster"]

MODES = ["auto", "buffers", "off"]
VERIFY = ["first", "always", "never"]


def known(make: type, **keywords: Any) -> dict[str, Any]:
    """Of some keywords, those that this version of ComfyUI takes; all of them are for looks."""
    return {name: value for name, value in keywords.items() if name in _parameters(make)}


def _parameters(make: type) -> set[str]:
    return set(inspect.signature(make).parameters)


def schema(**keywords: Any) -> io.Schema:
    """A node's schema in this pack's category."""
    return io.Schema(
        category=CATEGORY, **known(io.Schema, search_aliases=SEARCH_ALIASES), **keywords
    )


def mode() -> io.Combo.Input:
    """The toggle that every node of the pack begins with."""
    return io.Combo.Input(
        "mode",
        options=MODES,
        default="auto",
        tooltip="auto replays CUDA graphs where that is safe and steps down visibly where it is "
        "not. buffers keeps the prompt's keys and values, without graphs. off runs the model as "
        "if this node were not there. The picture is the same in all three.",
    )


def advanced() -> list:
    """The settings that hardly anybody needs."""
    return [
        io.Combo.Input(
            "verify",
            options=VERIFY,
            default="first",
            tooltip="Compare our step with ComfyUI's own, bit by bit, at the cost of one step: the "
            "first time a size is met, at every step, or never.",
            **known(io.Combo.Input, advanced=True),
        ),
        io.Boolean.Input(
            "keep_between_runs",
            default=False,
            tooltip="Keep buffers and graphs when a run has ended. The next run of the same size "
            "then starts at full speed, and the memory stays taken until then.",
            **known(io.Boolean.Input, advanced=True),
        ),
        io.Float.Input(
            "max_vram_gb",
            default=0.0,
            min=0.0,
            max=1024.0,
            step=0.1,
            tooltip="Most GiB that buffers and graphs may take. 0 takes what is free, less what "
            "ComfyUI keeps for itself.",
            **known(io.Float.Input, advanced=True),
        ),
        io.Int.Input(
            "min_steps",
            default=3,
            min=2,
            max=100,
            tooltip="Runs of fewer steps are left alone: the first step fills the buffers, the "
            "second warms up, and only from the third on is anything gained.",
            **known(io.Int.Input, advanced=True),
        ),
    ]
