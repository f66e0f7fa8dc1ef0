"""The entries of a cache: who owns which buffers, and what is given up when room is short."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .capture import CapturedStep, Capturer, StaticInputs
from .layout import CacheKey
from .memory import available_bytes, format_bytes
from .prefix import Arrangement, PrefixBuffers, PrefixShape, preferred_arrangements
from .reasons import Fallback

_PASSING = ("vram_graph", "graph_budget")
"""Reasons against a capture that may be gone by the next run."""


@dataclass(eq=False)
class Entry:
    """Buffers and graph of one conditioning.

    Attributes
    ----------
    key
        What the buffers and the graph fit.
    buffers
        Prefix K/V and room for the target's.
    inputs
        Static inputs and output of the decode step.
    owner
        Weak reference to the conditioning whose prefix is in the buffers.
    run
        Number of the run that registered it.
    warm
        Whether the decode step has been rehearsed, so that it can be captured.
    decoded
        Whether a decode step has run over the prefix that is in the buffers.
    captured
        The graph, once there is one.
    no_capture
        Why this entry is not captured, once that is known.
    """

    key: CacheKey
    buffers: PrefixBuffers
    inputs: StaticInputs
    owner: weakref.ReferenceType[Any]
    run: int
    warm: bool = False
    decoded: bool = False
    captured: CapturedStep | None = None
    no_capture: Fallback | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of buffers and static inputs; graphs share a pool and are counted there."""
        return self.buffers.nbytes + self.inputs.nbytes

    def release_graph(self) -> None:
        """Drop the graph, if any; the next decode step warms up again."""
        if self.captured is not None:
            self.captured.release()
        self.captured = None
        self.warm = False


@dataclass
class Limits:
    """Bounds of a cache.

    Parameters
    ----------
    max_entries
        Conditionings held at once.
    max_bytes
        Bytes of buffers and graphs held at once; None for no limit but the device's memory.
    headroom_bytes
        Device memory that is left free when buffers are allocated, for the model's activations
        and the VAE.
    arrangement
        "auto" chooses by the layout, see `graph_cache.prefix.preferred_arrangements`.
    """

    max_entries: int = 8
    max_bytes: int | None = None
    headroom_bytes: int = 2 << 30
    arrangement: Arrangement | str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.max_entries, int) or self.max_entries < 1:
            raise ValueError(f"max_entries must be a positive integer, not {self.max_entries!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"max_bytes must be positive or None, not {self.max_bytes!r}")
        if self.headroom_bytes < 0:
            raise ValueError(f"headroom_bytes must not be negative, not {self.headroom_bytes!r}")
        if self.arrangement not in ("auto", "per_layer", "shared"):
            raise ValueError(
                f"arrangement must be 'auto', 'per_layer' or 'shared', not {self.arrangement!r}"
            )

    def arrangements(self, shape: PrefixShape) -> tuple[Arrangement, ...]:
        """Arrangements to try, the preferred one first."""
        return preferred_arrangements(shape) if self.arrangement == "auto" else (self.arrangement,)


@dataclass
class EntryStore:
    """All entries of a cache, the least recently used first.

    Parameters
    ----------
    limits
        Bounds.
    capturer
        Knows how many bytes the graphs hold.
    make_room
        Asks others to leave so many bytes of a device free.
    pending_bytes
        Tells how many bytes of a device are free but spoken for.
    """

    limits: Limits
    capturer: Capturer
    make_room: Callable[[int, torch.device], None] | None = None
    pending_bytes: Callable[[], int] = int
    _entries: list[Entry] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries))

    @property
    def buffer_bytes(self) -> int:
        """Bytes held by buffers and static inputs."""
        return sum(entry.nbytes for entry in self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes held by buffers and graphs."""
        return self.buffer_bytes + self.capturer.nbytes

    def find(self, owner: object) -> Entry | None:
        """The entry that holds a conditioning's prefix, if one does."""
        return next((entry for entry in self._entries if entry.owner() is owner), None)

    def touch(self, entry: Entry) -> None:
        """Mark an entry as the most recently used."""
        if self._entries[-1] is not entry:
            self._entries.remove(entry)
            self._entries.append(entry)

    def acquire(
        self,
        key: CacheKey,
        owner: object,
        run: int,
        shape: PrefixShape,
        make_inputs: Callable[[], StaticInputs],
    ) -> Entry | Fallback:
        """Buffers for a conditioning: reused if nobody else's prefix is in them, else new.

        Parameters
        ----------
        key
            What the buffers must fit.
        owner
            The conditioning; only a weak reference is kept.
        run
            Number of the current run, whose entries are never evicted.
        shape
            Sizes of new buffers.
        make_inputs
            Makes the static inputs of a new entry.

        Returns
        -------
        Entry or Fallback
            Why there is no entry, where limits or memory do not allow one.
        """
        ours = [
            entry
            for entry in self._entries
            if entry.key == key and (entry.owner() is None or entry.owner() is owner)
        ]
        if ours:
            # A captured one first: that is what makes the second picture start at full speed.
            entry = max(ours, key=lambda candidate: candidate.captured is not None)
            self._disown(owner)
            entry.owner = weakref.ref(owner)
            if entry.no_capture is not None and entry.no_capture.code in _PASSING:
                entry.no_capture = None
            entry.run = run
            entry.decoded = False
            self.touch(entry)
            return entry
        self._disown(owner)
        while len(self._entries) >= self.limits.max_entries:
            if not self._evict(run):
                return Fallback("budget", f"max_entries={self.limits.max_entries}")
        short: Fallback | None = None
        for arrangement in self.limits.arrangements(shape):
            short = self._make_room(shape.nbytes(arrangement), key.device, run)
            if short is not None:
                continue
            try:
                entry = Entry(
                    key,
                    PrefixBuffers(shape, key.device, arrangement),
                    make_inputs(),
                    weakref.ref(owner),
                    run,
                )
            except torch.OutOfMemoryError:
                # Free memory can be in pieces, or taken by another process meanwhile.
                short = Fallback("vram", f"{format_bytes(shape.nbytes(arrangement))} of buffers")
                continue
            self._entries.append(entry)
            return entry
        return short

    def _disown(self, owner: object) -> None:
        """A conditioning is prefilled again: whatever prefix of it is held, is an old one."""
        for entry in self._entries:
            if entry.owner() is owner:
                entry.owner = _nobody

    def _make_room(self, need: int, device: torch.device, run: int) -> Fallback | None:
        """Evict until ``need`` more bytes fit; the reason why they never will, otherwise."""
        limits = self.limits
        headroom = limits.headroom_bytes + self.pending_bytes()
        asked = self.make_room is None
        while True:
            available = available_bytes(device, self.capturer.nbytes)
            if limits.max_bytes is not None and self.nbytes + need > limits.max_bytes:
                short = Fallback(
                    "budget",
                    f"{format_bytes(need)} of buffers needed, {format_bytes(self.nbytes)} held, "
                    f"max_bytes={format_bytes(limits.max_bytes)}",
                )
            elif available is not None and need + headroom > available:
                short = Fallback(
                    "vram",
                    f"{format_bytes(need)} of buffers and {format_bytes(headroom)} of headroom "
                    f"needed, {format_bytes(available)} free",
                )
            else:
                return None
            if short.code == "vram" and not asked:
                self.make_room(need + headroom, device)
                asked = True
            elif not self._evict(run):
                return short

    def _evict(self, run: int) -> bool:
        """Drop the least recently used entry, one without a living owner first.

        A living owner is often a mere remnant: the traceback of a cancelled run keeps its
        conditioning alive. Such an entry can go too, but never one of the current run.
        """
        idle = [entry for entry in self._entries if entry.owner() is None]
        old = [entry for entry in self._entries if entry.run != run]
        for entry in (*idle, *old):
            self.drop(entry)
            return True
        return False

    def drop(self, entry: Entry) -> None:
        """Give an entry's graph back and forget its buffers.

        The conditioning may still hold views of its prefix, for the model's own path; the memory
        is free as soon as it is gone too.
        """
        entry.release_graph()
        entry.owner = _nobody
        if entry in self._entries:
            self._entries.remove(entry)

    def drop_idle(self) -> None:
        """Give back what no living conditioning owns."""
        for entry in list(self._entries):
            if entry.owner() is None:
                self.drop(entry)

    def release_graphs(self) -> None:
        """Give every graph back; buffers stay."""
        for entry in self._entries:
            entry.release_graph()

    def clear(self) -> None:
        """Give everything back."""
        for entry in list(self._entries):
            self.drop(entry)

    def fit_graph(self, entry: Entry) -> Fallback | None:
        """Keep the limits after a capture; the reason why the new graph had to go, if it had."""
        limit = self.limits.max_bytes
        while limit is not None and self.nbytes > limit:
            if not self._evict(entry.run):
                entry.release_graph()
                over = f"{format_bytes(self.nbytes)} held, max_bytes={format_bytes(limit)}"
                return Fallback("graph_budget", over)
        return None


def _nobody() -> None:
    """Stands for the weak reference of an owner that is gone."""
