"""What several test modules need; no fixtures, no tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from graph_cache import steps
from graph_cache.capture import StaticInputs, bitwise_equal
from graph_cache.layout import SequenceLayout
from graph_cache.prefix import PrefixBuffers
from graph_cache.reasons import Fallback

TEXT = SequenceLayout((7,), (), (1, 4, 6))
SHORTER_TEXT = SequenceLayout((3,), (), (1, 4, 6))
ONE_REFERENCE = SequenceLayout((2, 7), ((1, 4, 6),), (1, 4, 6))
ONE_REFERENCE_TURNED = SequenceLayout((2, 7), ((1, 6, 4),), (1, 4, 6))


def references(count: int, text: int = 5) -> SequenceLayout:
    """A layout with as many references, of different shapes, two of them side by side."""
    grids = tuple((1, 2 + 2 * (i % 3), 4) for i in range(count))
    runs = [2] * count
    if count > 1:
        runs[1] = 0
    return SequenceLayout((*runs, text), grids, (1, 4, 6))


class FakeStep:
    """Runs the body again instead of a graph, over the same static tensors."""

    seconds = 0.01
    nbytes = 1000

    def __init__(self, owner: FakeCapturer, body: Callable, inputs: StaticInputs, weights: tuple):
        self.owner, self.body, self.inputs, self.weights = owner, body, inputs, weights
        self.released = False
        self.replays = 0

    def replay(self) -> None:
        assert not self.released, "a released graph was replayed"
        self.replays += 1
        self.inputs.output.copy_(self.body())
        if self.owner.corrupt_replays:
            self.inputs.output.add_(1)

    def release(self) -> None:
        self.released = True
        self.body = self.inputs = None


class FakeCapturer:
    """Stands in for CUDA so that the manager's decisions can be tested anywhere."""

    def __init__(self) -> None:
        self.steps: list[FakeStep] = []
        self.error: BaseException | None = None
        self.corrupt_replays = False
        self.why_not: Fallback | None = None
        self.why_no_capture: Fallback | None = None

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps if not step.released)

    def unavailable(self, device: torch.device) -> Fallback | None:
        return self.why_not

    def rehearse(self, body: Callable) -> tuple[torch.Tensor, Fallback | None]:
        return body(), self.why_no_capture

    def capture(
        self, body: Callable, inputs: StaticInputs, buffers: PrefixBuffers, weights: tuple
    ) -> FakeStep:
        if self.error is not None:
            raise self.error
        self.steps.append(FakeStep(self, body, inputs, weights))
        self.steps[-1].replay()
        return self.steps[-1]


def forget_verified() -> None:
    """Each test is a process of its own as far as `verify="first"` goes."""
    steps._verified.clear()


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Bitwise equality of two lists of tensors."""
    return len(ours) == len(theirs) and all(map(bitwise_equal, ours, theirs))


def counters_add_up(report, steps: int, conditionings: int = 1) -> bool:
    """Every call is exactly one of prefill, captured, replayed and eager by reason."""
    counts = report.counts
    return (
        sum(counts.values()) == report.calls == steps * conditionings
        and sum(report.eager_reasons.values()) == counts["eager"]
    )


def kinds(cache) -> list[str]:
    """What each call of the last run was."""
    return [step.kind.value for step in cache.report().steps]


def step_of(work, kv_cache, latents, step: int, steps: int) -> torch.Tensor:
    """One call of a workload's first conditioning, in its caller's own loop."""
    arguments = work.arguments(0, latents, 1 - step / steps)
    mode = "cached" if step else "extract"
    output = work.model(**arguments, kv_cache=kv_cache, kv_cache_mode=mode)[0]
    return output[:, -latents.shape[1] :]
