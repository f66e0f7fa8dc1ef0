"""What a node asks for, and what it is told while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ...dispatcher import Mode
from ...layout import Profile
from ...steps import Verify

_CHOICES = {"mode": get_args(Mode), "verify": get_args(Verify), "profile": get_args(Profile)}


@dataclass(frozen=True)
class Options:
    """What a node asks for.

    Attributes
    ----------
    mode, verify, profile
        See `graph_cache.manager.GraphCache.attach`.
    keep_between_runs
        Keep buffers and graphs when a run ends, for the next one of the same size.
    max_vram_gb
        Most GiB that buffers and graphs may hold; 0 for whatever is free.
    min_steps
        Runs of fewer steps are left alone.

    Raises
    ------
    ValueError
        If there is no such mode, verification or profile, or a number is negative.
    """

    mode: Mode = "auto"
    verify: Verify = "first"
    keep_between_runs: bool = False
    max_vram_gb: float = 0.0
    min_steps: int = 3
    profile: Profile = "exact"

    def __post_init__(self) -> None:
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name} must be one of {', '.join(values)}, not {getattr(self, name)!r}"
                )
        for name in ("max_vram_gb", "min_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)!r}")

    @property
    def max_bytes(self) -> int | None:
        """`max_vram_gb` in bytes; None for no limit."""
        return max(1, int(self.max_vram_gb * 2**30)) if self.max_vram_gb > 0 else None


@dataclass(frozen=True)
class Live:
    """Where a run is.

    Attributes
    ----------
    mode
        What was asked for.
    step, steps
        Steps that have ended, and all of the schedule.
    step_ms
        What the last step took, by the host's clock.
    kind, path
        What its last model call was and how it ran: values of `graph_cache.report.Kind` and
        `graph_cache.reasons.Path`.
    """

    mode: str
    step: int
    steps: int
    step_ms: float
    kind: str
    path: str
