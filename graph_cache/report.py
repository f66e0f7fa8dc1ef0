"""What happened in a run, as data, as JSON, as a table and as one line."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from enum import Enum

import torch

from .memory import format_bytes
from .reasons import REASONS, Fallback, Path

SCHEMA = 1
"""Version of the report's JSON; raised when a field changes its meaning or goes."""


class Kind(str, Enum):
    """What a model call turned out to be; every finished call is exactly one of these."""

    PREFILL = "prefill"
    """The whole sequence was computed and the prefix K/V were kept."""
    CAPTURED = "captured"
    """A decode step was captured as a CUDA graph, then replayed for the first time."""
    REPLAYED = "replayed"
    """A captured decode step was replayed."""
    EAGER = "eager"
    """A step ran without a graph; its reason says why."""


@dataclass
class Step:
    """One model call.

    Attributes
    ----------
    kind, path
        What it was and how it ran.
    reason
        Reason code, where it did not run as a graph.
    conditioning
        Index of the conditioning within the run; -1 where there is none.
    host_ms
        Time on the host until the call returned, in ms; on a GPU the work may still be queued.
    """

    kind: Kind
    path: Path
    reason: str | None
    conditioning: int
    host_ms: float
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = field(default=None, repr=False)

    @property
    def gpu_ms(self) -> float | None:
        """Time between the call's first and last work on the GPU's stream, in ms."""
        if self.events is None:
            return None
        start, end = self.events
        end.synchronize()
        return start.elapsed_time(end)


@dataclass
class Conditioning:
    """One conditioning of a run: a prompt with its references.

    Attributes
    ----------
    prefix_tokens, references, target_tokens, batch
        Sizes of its sequence.
    arrangement
        Of its buffers, see `graph_cache.prefix`; None where it has none.
    buffer_bytes
        Held for it.
    """

    prefix_tokens: int = 0
    references: int = 0
    target_tokens: int = 0
    batch: int = 1
    arrangement: str | None = None
    buffer_bytes: int = 0


@dataclass
class RunReport:
    """A run: from a prefill to the next one.

    Attributes
    ----------
    run
        Number of the run, from 1.
    adapter
        Which door the model came through, for example "diffusers".
    mode
        What was asked for: auto, buffers or off.
    profile
        What ran. "exact": bit for bit what the model's own cached step gives; "fast": a step at
        least was the same mathematics through other kernels.
    kernels
        What ran each operation of a fast step.
    difference
        The largest relative difference of a fast step to the model's own cached step, as far as
        they were compared in this run: the norm of the difference over the norm of the latter.
    device, dtype, attention, torch_version
        What it ran on and with.
    steps
        Every finished call.
    conditionings
        Every conditioning that was registered.
    fallbacks
        Every reason that was met, by code.
    captures, capture_seconds
        Graphs captured in this run, and the time that took, the GPU being idle.
    entries, buffer_bytes, graph_bytes
        What the cache holds now, over all runs.
    peak_bytes
        The most that buffers and graphs held during the run.
    planned_steps, finished_steps
        Steps of the run's schedule, and those that ended; None where nobody tells.
    step_ms, native_step_ms
        What a step took, by the host's clock, and what it takes without the cache, as far as the
        process has seen a comparable run; None where that is not known.
    weights
        Type of the model's weights, and where they are.
    verified
        Bitwise comparisons made in this run: "body" with the model's own cached step, "replay"
        with the body.
    error
        Type and first line of an exception that ended a call of this run.
    """

    run: int = 0
    adapter: str = "none"
    mode: str = "auto"
    profile: str = "exact"
    kernels: dict[str, str] = field(default_factory=dict)
    difference: float | None = None
    device: str = ""
    dtype: str = ""
    attention: str = ""
    torch_version: str = torch.__version__
    steps: list[Step] = field(default_factory=list)
    conditionings: list[Conditioning] = field(default_factory=list)
    fallbacks: dict[str, Fallback] = field(default_factory=dict)
    captures: int = 0
    capture_seconds: float = 0.0
    entries: int = 0
    buffer_bytes: int = 0
    graph_bytes: int = 0
    peak_bytes: int = 0
    planned_steps: int | None = None
    finished_steps: int | None = None
    step_ms: float | None = None
    native_step_ms: float | None = None
    weights: str = ""
    verified: dict[str, bool] = field(default_factory=dict)
    error: str | None = None

    def note(self, fallback: Fallback) -> None:
        """Remember a reason; the first detail met for a code is kept."""
        self.fallbacks.setdefault(fallback.code, fallback)

    @property
    def counts(self) -> dict[str, int]:
        """Calls by kind; the values add up to ``calls``."""
        kinds = Counter(step.kind for step in self.steps)
        return {kind.value: kinds[kind] for kind in Kind}

    @property
    def calls(self) -> int:
        """Finished model calls: steps times conditionings."""
        return len(self.steps)

    @property
    def eager_reasons(self) -> dict[str, int]:
        """Eager calls by reason code; the values add up to ``counts["eager"]``."""
        return dict(Counter(step.reason for step in self.steps if step.kind is Kind.EAGER))

    @property
    def path(self) -> Path:
        """The best path that a call of the run took."""
        taken = {step.path for step in self.steps}
        return next((path for path in Path if path in taken), Path.NATIVE)

    @property
    def seconds_saved(self) -> float | None:
        """Estimate of what the steps after the first took less than without the cache, in s."""
        if self.step_ms is None or self.native_step_ms is None or self.path is Path.NATIVE:
            return None
        return ((self.finished_steps or 1) - 1) * (self.native_step_ms - self.step_ms) / 1e3

    def to_dict(self) -> dict:
        """The report as plain data; waits for the run's GPU work to have its times."""
        reasons = Counter(step.reason for step in self.steps if step.reason)
        return {
            "schema": SCHEMA,
            "run": self.run,
            "adapter": self.adapter,
            "mode": self.mode,
            "path": self.path.value,
            "profile": self.profile,
            "kernels": self.kernels,
            "difference": self.difference,
            "device": self.device,
            "dtype": self.dtype,
            "attention": self.attention,
            "torch": self.torch_version,
            "calls": self.calls,
            "counts": self.counts,
            "eager_reasons": self.eager_reasons,
            "ms_per_call": self.timings(),
            "fallbacks": [
                {
                    "code": code,
                    "calls": reasons[code],
                    "path": fallback.path.value,
                    "expected": REASONS[code].expected,
                    "sentence": fallback.sentence,
                    "hint": fallback.hint,
                }
                for code, fallback in self.fallbacks.items()
            ],
            "conditionings": [asdict(conditioning) for conditioning in self.conditionings],
            "captures": self.captures,
            "capture_seconds": round(self.capture_seconds, 4),
            "entries": self.entries,
            "buffer_bytes": self.buffer_bytes,
            "graph_bytes": self.graph_bytes,
            "peak_bytes": self.peak_bytes,
            "planned_steps": self.planned_steps,
            "finished_steps": self.finished_steps,
            "step_ms": _rounded(self.step_ms),
            "native_step_ms": _rounded(self.native_step_ms),
            "seconds_saved": _rounded(self.seconds_saved),
            "weights": self.weights,
            "verified": self.verified,
            "error": self.error,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def _groups(self) -> dict[str, list[Step]]:
        """Steps by what they were, eager ones by reason too, in the order of `Kind`."""
        groups: dict[str, list[Step]] = {}
        for kind in Kind:
            for step in self.steps:
                if step.kind is kind:
                    name = kind.value + (f" ({step.reason})" if step.reason else "")
                    groups.setdefault(name, []).append(step)
        return groups

    def timings(self) -> dict[str, dict[str, float | int | None]]:
        """Median host and GPU time of a call in ms, by kind and reason."""
        rows = {}
        for name, steps in self._groups().items():
            gpu = [step.gpu_ms for step in steps]
            rows[name] = {
                "calls": len(steps),
                "host_ms": round(statistics.median(step.host_ms for step in steps), 3),
                "gpu_ms": None if None in gpu else round(statistics.median(gpu), 3),
            }
        return rows

    def table(self) -> str:
        """The step table, then what is held, then every reason with its hint."""
        lines = [f"{'call':<28}{'count':>7}{'ms host':>11}{'ms GPU':>11}"]
        for name, row in self.timings().items():
            gpu = "-" if row["gpu_ms"] is None else f"{row['gpu_ms']:.2f}"
            lines.append(f"{name:<28}{row['calls']:>7}{row['host_ms']:>11.2f}{gpu:>11}")
        lines += [
            f"{'total':<28}{self.calls:>7}",
            "",
            f"held: {format_bytes(self.buffer_bytes)} of buffers in {self.entries} entries, "
            f"{format_bytes(self.graph_bytes)} of graphs ({self.captures} captured in "
            f"{self.capture_seconds:.2f} s)",
        ]
        if self.kernels:
            kernels = "; ".join(f"{name}: {kernel}" for name, kernel in self.kernels.items())
            lines.append(f"{self.profile} profile: {kernels}")
        if self.difference is not None:
            lines.append(f"relative difference to the exact step: {self.difference:.1e}")
        for code, fallback in self.fallbacks.items():
            lines.append(f"{code}: {fallback.sentence} {fallback.hint}")
        return "\n".join(lines)

    def line(self) -> str:
        """One line for a log or a node."""
        counts = self.counts
        graph = counts["captured"] + counts["replayed"]
        parts = [f"{self.path.value}: {graph}/{self.calls} calls as a graph"]
        if self.profile != "exact":
            away = "" if self.difference is None else f" ({self.difference:.1e} from exact)"
            parts.append(f"{self.profile} profile{away}")
        parts += [f"{number} eager ({code})" for code, number in self.eager_reasons.items()]
        for conditioning in self.conditionings[:1]:
            parts.append(
                f"prefix {conditioning.prefix_tokens} tokens (refs={conditioning.references})"
            )
        parts.append(format_bytes(self.peak_bytes))
        return ", ".join(parts)


def _rounded(number: float | None) -> float | None:
    return None if number is None else round(number, 3)
