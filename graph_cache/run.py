"""One run of the model: where it begins, which conditionings it has, and its report."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from .capture import Capturer
from .errors import OWN_ERRORS, failure
from .layout import SequenceLayout
from .models.base import Adapter, ModelCall, Phase
from .prefix import PrefixBuffers
from .reasons import Fallback, Path
from .report import Conditioning, Kind, RunReport, Step


class Outcome(NamedTuple):
    """What became of one call.

    Attributes
    ----------
    result
        What the model's caller gets.
    kind, path
        What the call was and how it ran.
    fallback
        Why it did not run as a graph, where it did not.
    """

    result: Any
    kind: Kind
    path: Path
    fallback: Fallback | None = None


def begin_run(number: int, mode: str, adapter: Adapter, call: ModelCall) -> Run:
    """Open a run with its first call."""
    gpu = call.device.type == "cuda"
    report = RunReport(
        run=number,
        adapter=adapter.name,
        mode=mode,
        device=torch.cuda.get_device_name(call.device) if gpu else str(call.device),
        dtype=str(call.dtype).removeprefix("torch."),
    )
    return Run(report, call.phase)


def check_model(adapter: Adapter, capturer: Capturer, call: ModelCall) -> list[Fallback]:
    """Look a model over before a prefill, its weights included; what stands against the cache."""
    try:
        fallbacks = model_fallbacks(adapter, call)
        adapter.refresh_weights()
    except OWN_ERRORS as error:
        # A model whose structure even our checks do not know.
        return [failure(error)]
    unavailable = capturer.unavailable(call.device)
    return fallbacks if unavailable is None else [*fallbacks, unavailable]


def model_fallbacks(adapter: Adapter, call: ModelCall | None) -> list[Fallback]:
    """What about a model stands against the cache, the first finding of each code."""
    found: dict[str, Fallback] = {}
    for fallback in adapter.fallbacks(call):
        found.setdefault(fallback.code, fallback)
    return list(found.values())


_LONG_RUN = 1000
"""Calls after which a run without K/V cache is taken for over: nothing tells where it ends."""


class Run:
    """The calls from one prefill (or one prefill a conditioning) to the next.

    Parameters
    ----------
    report
        Where the run is recorded.
    phase
        Of the run's first call.

    Attributes
    ----------
    fallbacks
        Reasons that hold until the next prefill.
    """

    def __init__(self, report: RunReport, phase: Phase) -> None:
        self.report = report
        self.fallbacks: list[Fallback] = []
        self._cached = phase is not Phase.UNCACHED
        self._decoded = False
        # Weak: a conditioning lives as long as its pipeline needs it, not as long as our report.
        self._index: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._stopped: weakref.WeakKeyDictionary[Any, Fallback] = weakref.WeakKeyDictionary()

    def ends_with(self, call: ModelCall) -> bool:
        """Whether a call is the first of the next run.

        The model is not told where a run begins; but a run prefills each of its conditionings
        once, and all of them before it decodes any.
        """
        if call.phase is Phase.PREFILL:
            again = call.conditioning in self._index
            gone = bool(self.report.conditionings) and not len(self._index)
            return again or gone or self._decoded or not self._cached
        if call.phase is Phase.UNCACHED:
            return self._cached or len(self.report.steps) >= _LONG_RUN
        return not self._cached

    def begin(self, call: ModelCall) -> None:
        """Take note of a call that is about to be decided."""
        if call.phase is Phase.PREFILL and call.conditioning is not None:
            self._index[call.conditioning] = len(self.report.conditionings)
            self.report.conditionings.append(Conditioning(batch=call.batch))
        self._decoded = self._decoded or call.phase is Phase.DECODE

    def describe(
        self, call: ModelCall, layout: SequenceLayout, buffers: PrefixBuffers | None
    ) -> None:
        """Put a prefill's layout and buffers into the report."""
        noted = self.report.conditionings[self._index[call.conditioning]]
        noted.prefix_tokens = layout.prefix_tokens
        noted.references = len(layout.references)
        noted.target_tokens = layout.target_tokens
        if buffers is not None:
            noted.arrangement = buffers.arrangement
            noted.buffer_bytes = buffers.nbytes

    def stop(self, call: ModelCall, fallback: Fallback) -> None:
        """Remember why a conditioning lost its buffers, for the steps that follow."""
        if call.conditioning is not None:
            self._stopped[call.conditioning] = fallback

    def stop_all(self, fallback: Fallback) -> None:
        """Remember why every conditioning of the run lost its buffers."""
        for conditioning in self._index:
            self._stopped[conditioning] = fallback

    def stopped(self, call: ModelCall) -> Fallback | None:
        """Why a conditioning has no buffers, if that is known."""
        return self._stopped.get(call.conditioning)

    def record(
        self,
        call: ModelCall,
        outcome: Outcome,
        host_ms: float,
        events: tuple[torch.cuda.Event, torch.cuda.Event] | None,
    ) -> None:
        """Record a finished call; the only place that adds to a report's steps."""
        fallback = outcome.fallback
        code = fallback.code if fallback is not None else None
        index = -1 if call.conditioning is None else self._index.get(call.conditioning, -1)
        step = Step(outcome.kind, outcome.path, code, index, host_ms, events)
        self.report.steps.append(step)
        if fallback is not None:
            self.report.note(fallback)
