"""How long a step of a run takes, and how long it took without the cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable

_BEFORE_REPLAY = 3
"""Steps that are not like the others: prefill, warm-up and capture."""

_native: dict[Hashable, float] = {}
"""Milliseconds a step of the model's own path, by workload, in this process."""


class Pace:
    """Times between the steps of one run, by the host's clock.

    A sampler waits for the GPU somewhere in each step, so over several steps these are the times
    that a user waits for.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._last = self._began
        self._steps: list[float] = []

    def tick(self) -> float:
        """A step has ended; its time in ms."""
        now = time.perf_counter()
        self._steps.append((now - self._last) * 1e3)
        self._last = now
        return self._steps[-1]

    @property
    def steps(self) -> int:
        """Steps that have ended."""
        return len(self._steps)

    @property
    def step_ms(self) -> float | None:
        """Median time of the steps that are like all further ones; None before there are any."""
        like = self._steps[_BEFORE_REPLAY:]
        return statistics.median(like) if like else None


def remember_native(workload: Hashable, step_ms: float) -> None:
    """Keep the time of a step that the model's own path took.

    Parameters
    ----------
    workload
        Tells runs apart whose steps are not comparable: model, sizes, references, batch.
    step_ms
        `Pace.step_ms` of a run without us.
    """
    _native[workload] = step_ms


def native_step_ms(workload: Hashable) -> float | None:
    """What a step took without the cache, as far as this process has seen it."""
    return _native.get(workload)
