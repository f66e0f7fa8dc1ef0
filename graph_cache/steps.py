"""One decode step over an entry: replayed, captured, or run eagerly with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch

from .capture import Capturer, bitwise_equal, relative_difference
from .entries import Entry, EntryStore
from .errors import first_line, is_out_of_memory
from .models.base import Adapter, ModelCall
from .reasons import Fallback, Path
from .report import Kind
from .run import Outcome, Run
from .settings import numeric_settings

Verify = Literal["first", "always", "never"]
Body = Callable[[], torch.Tensor]

_BEFORE_A_CAPTURE = ("warm_up", "weights_changed")
"""Reasons of eager steps that the next step will capture, unless something speaks against it."""

_FARTHEST = {torch.bfloat16: 0.06, torch.float16: 0.02, torch.float32: 1e-3}
"""Relative difference of a fast step to the model's own from which on it is taken for wrong. In the
7 B model in bfloat16 rounding alone gives 0.014 (docs/performance.md)."""

_verified: set[tuple] = set()
"""What ``verify="first"`` has found equal in this process, see `StepRunner._check`."""


class StepRunner:
    """Runs decode steps, and compares them with what they must equal.

    Parameters
    ----------
    adapter
        Of the model.
    store
        Of the entries; it bounds what a capture may hold.
    capturer
        Makes the graphs.
    verify
        "first", "always" or "never", see `graph_cache.manager.GraphCache.attach`.

    Raises
    ------
    ValueError
        If ``verify`` is none of these.
    """

    def __init__(
        self, adapter: Adapter, store: EntryStore, capturer: Capturer, verify: Verify
    ) -> None:
        self._adapter = adapter
        self._store = store
        self._capturer = capturer
        self.verify = verify
        self._no_graphs: Fallback | None = None

    @property
    def verify(self) -> Verify:
        """When steps are compared with what they must equal."""
        return self._verify

    @verify.setter
    def verify(self, verify: Verify) -> None:
        if verify not in ("first", "always", "never"):
            raise ValueError(f"verify must be 'first', 'always' or 'never', not {verify!r}")
        self._verify = verify

    def run(self, run: Run, call: ModelCall, entry: Entry, graphs: bool) -> Outcome | Fallback:
        """Run one step.

        Parameters
        ----------
        run
            The current run.
        call
            A decode call that fits the entry.
        entry
            Of the call's conditioning.
        graphs
            Whether graphs are asked for.

        Returns
        -------
        Outcome or Fallback
            A fallback where the model's own path has to run instead.

        Raises
        ------
        RuntimeError
            Whatever the step raised, running out of memory included.
        """
        entry.inputs.load(self._adapter.step_values(call, entry.key.layout))
        body = self._adapter.body(call, entry)
        outcome = self._graph(run, call, entry, body, graphs)
        if isinstance(outcome, Fallback):
            outcome = self._eager(run, call, entry, body, outcome)
        if isinstance(outcome, Outcome) and entry.key.profile != run.report.profile:
            # Only a step that was kept counts.
            run.report.profile = entry.key.profile
            run.report.kernels = self._adapter.kernels()
        if isinstance(outcome, Outcome) and not entry.decoded:
            entry.decoded = True
            # Only then: what the model keeps is what the others will be compared with.
            if all(other.decoded for other in self._store if other.run == entry.run):
                self._adapter.settle()
        return outcome

    def _graph(
        self, run: Run, call: ModelCall, entry: Entry, body: Body, graphs: bool
    ) -> Outcome | Fallback:
        """Replay a step, captured first where it has to be; or why it has to run eagerly."""
        why = self._eager_reason(run, call, entry, graphs)
        if why is not None:
            return why
        # Until the replay is enqueued. An eager step must not hold its weights: the model's
        # library may have to move some to make room for others.
        with self._adapter.resident() as away:
            if away is not None:
                entry.release_graph()
                return away
            kind = Kind.REPLAYED
            if entry.captured is None or entry.captured.weights != self._adapter.weights():
                why = self._before_a_capture(call, entry)
                if why is not None:
                    return why
                kind = Kind.CAPTURED
                why = self._capture(run, entry, body)
                if why is not None:
                    return why
            else:
                entry.captured.replay()
        # Copied out before anybody else can replay into the static output.
        output = entry.inputs.output.clone()
        if kind is Kind.CAPTURED and not self._replay_is_exact(run, entry, body, output):
            self._no_graphs = Fallback("parity_graph")
            self._store.release_graphs()
            return self._no_graphs
        return Outcome(self._adapter.wrap(call, output), kind, Path.GRAPH)

    def _before_a_capture(self, call: ModelCall, entry: Entry) -> Fallback | None:
        """Why there is to be no capture, or not yet: anything may have been done to the weights."""
        why = self._adapter.weight_fallback(call)
        if why is None and entry.captured is not None:
            why = Fallback("weights_changed")
        if why is not None:
            entry.release_graph()
        elif not entry.warm:
            why = Fallback("warm_up")
        return why

    def _eager(
        self, run: Run, call: ModelCall, entry: Entry, body: Body, why: Fallback
    ) -> Outcome | Fallback:
        if why.code in _BEFORE_A_CAPTURE:
            output, entry.no_capture = self._capturer.rehearse(body)
            entry.warm = True
        else:
            output = body()
        where = f"{run.report.dtype} on {run.report.device}"
        if entry.key.profile == "fast":
            away = self._difference(run, call, entry, output)
            if not away <= _FARTHEST[entry.key.dtype]:
                return Fallback("parity_fast", f"{away:.1e}, {where}")
        elif not self._body_is_exact(run, call, entry, output):
            return Fallback("parity", where)
        return Outcome(self._adapter.wrap(call, output), Kind.EAGER, Path.BUFFERS, why)

    def _eager_reason(
        self, run: Run, call: ModelCall, entry: Entry, graphs: bool
    ) -> Fallback | None:
        """What speaks against a graph, wherever the weights are."""
        if not graphs:
            return Fallback("mode_buffers")
        for fallback in (self._no_graphs, *run.fallbacks, entry.no_capture):
            if fallback is not None and fallback.path is Path.BUFFERS:
                return fallback
        key = entry.key
        if (self._adapter.attention(call), numeric_settings()) != (key.attention, key.settings):
            return Fallback("settings_changed")
        return None

    def _capture(self, run: Run, entry: Entry, body: Body) -> Fallback | None:
        """Capture an entry's step; the reason why there is no graph, if there is none."""
        adapter, inputs = self._adapter, entry.inputs
        try:
            entry.captured = self._capturer.capture(body, inputs, entry.buffers, adapter.weights())
        except RuntimeError as error:
            # What CUDA and torch raise. Only the text outlives this block: the traceback holds
            # tensors of the failed capture.
            code = "vram_graph" if is_out_of_memory(error) else "capture_failed"
            entry.no_capture = Fallback(code, first_line(error))
        else:
            run.report.capture_seconds += entry.captured.seconds
            entry.no_capture = self._store.fit_graph(entry)
            run.report.captures += entry.no_capture is None
        if entry.no_capture is not None and inputs.output.is_cuda:
            torch.cuda.empty_cache()
        return entry.no_capture

    # --- checks --------------------------------------------------------------------------

    def _body_is_exact(self, run: Run, call: ModelCall, entry: Entry, output: torch.Tensor) -> bool:
        """Compare a step with the model's own cached step, if that is due; an extra step."""
        if not self._due("body", run, entry):
            return True
        reference = self._adapter.reference(call)
        if reference is None:
            # Nothing to compare with: the model would compute all of it again, and round otherwise.
            return True
        return self._note("body", run, entry, bitwise_equal(reference, output))

    def _difference(self, run: Run, call: ModelCall, entry: Entry, output: torch.Tensor) -> float:
        """How far a fast step is from the model's own cached step; 0 where that is not due."""
        if not self._due("body", run, entry):
            return 0.0
        reference = self._adapter.reference(call)
        if reference is None:
            return 0.0
        away = relative_difference(output, reference)
        if math.isfinite(away):
            run.report.difference = max(away, run.report.difference or 0.0)
        if away <= _FARTHEST[entry.key.dtype]:
            _verified.add(self._check("body", run, entry))
        return away

    def _replay_is_exact(self, run: Run, entry: Entry, body: Body, output: torch.Tensor) -> bool:
        """Compare a replay with the same step run eagerly, if that is due; an extra step."""
        if not self._due("replay", run, entry):
            return True
        equal = bitwise_equal(body(), output)
        return self._note("replay", run, entry, equal)

    def _check(self, check: str, run: Run, entry: Entry) -> tuple:
        """What a comparison speaks for: every step of this kind, whatever its prefix's length.

        A matrix product of another height or width may be another kernel, so sizes are in it.
        """
        key, shape = entry.key, entry.buffers.shape
        model = (self._adapter.name, shape.layers, shape.heads, run.report.device)
        kind = (key.batch, key.dtype, key.strides, key.attention, key.settings, key.profile)
        layout = (key.layout.target, bool(key.layout.references), entry.buffers.arrangement)
        return (check, model, kind, layout)

    def _due(self, check: str, run: Run, entry: Entry) -> bool:
        if self._verify == "first":
            return self._check(check, run, entry) not in _verified
        return self._verify == "always"

    def _note(self, check: str, run: Run, entry: Entry, equal: bool) -> bool:
        if equal:
            _verified.add(self._check(check, run, entry))
        run.report.verified[check] = run.report.verified.get(check, True) and equal
        return equal
