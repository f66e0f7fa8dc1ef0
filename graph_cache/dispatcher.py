"""Decides every call of a model, and records what it decided.

One dispatcher sees each call. It prefills, captures, replays, or steps down with a reason, and
every finished call is recorded exactly once; so the counters of a report always add up to the
calls that were made.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Literal

import torch

from .capture import Capturer
from .cuda_graphs import StreamOrder
from .eligibility import call_fallback
from .entries import Entry, EntryStore, Limits
from .errors import OWN_ERRORS, failure, first_line
from .layout import CacheKey, Profile
from .models.base import Adapter, ModelCall, Phase
from .profile import ProfileChoice
from .reasons import Fallback, Path
from .report import Kind, RunReport, Step
from .run import Outcome, Run, begin_run, check_model, model_fallbacks
from .settings import numeric_settings
from .steps import StepRunner, Verify

logger = logging.getLogger("graph_cache")

Mode = Literal["auto", "buffers", "off"]


class Dispatcher:
    """All decisions about one model's calls, and what is held for them.

    Parameters
    ----------
    adapter
        Of the model; without one, no call ever comes.
    mode, verify, profile
        See `graph_cache.manager.GraphCache.attach`.
    limits
        Of what is held.
    capturer
        Makes the graphs.

    Raises
    ------
    ValueError
        If there is no such mode, verification or profile.
    """

    def __init__(
        self,
        adapter: Adapter | None,
        mode: Mode,
        verify: Verify,
        limits: Limits,
        capturer: Capturer,
        profile: Profile = "exact",
    ) -> None:
        self.mode = mode
        self.profiles = ProfileChoice(profile)
        self.lock = threading.RLock()
        self.store = EntryStore(limits, capturer)
        if adapter is not None:
            self.store.make_room = adapter.make_room
            self.store.pending_bytes = adapter.pending_bytes
        self.steps = StepRunner(adapter, self.store, capturer, verify)
        self._adapter = adapter
        self._capturer = capturer
        self._order = StreamOrder()
        self._disabled: Fallback | None = None
        self._runs = 0
        self._run: Run | None = None
        self._open = False
        self._logged: set[str] = set()

    @property
    def mode(self) -> Mode:
        """auto, buffers or off; may be set between calls."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in ("auto", "buffers", "off"):
            raise ValueError(f"mode must be 'auto', 'buffers' or 'off', not {mode!r}")
        self._mode = mode

    def report(self) -> RunReport:
        """Of the last run, or the current one."""
        if self._run is not None:
            self.measure()
            return self._run.report
        # Nothing came through, for which the model itself may be the reason.
        report = RunReport(mode=self.mode)
        if self._adapter is not None:
            report.adapter = self._adapter.name
            try:
                fallbacks = model_fallbacks(self._adapter, None)
            except OWN_ERRORS as error:
                fallbacks = [failure(error)]
            for fallback in fallbacks:
                report.note(fallback)
        return report

    def open_run(self) -> None:
        """Begin a run; every call belongs to it until `close_run`.

        For a library that tells where a run begins. Without this, the calls tell.
        """
        self._open = True
        self._run = None

    def close_run(self) -> RunReport:
        """End the run that was opened, and report it."""
        report = self.report()
        self._open = False
        return report

    def last_step(self) -> Step | None:
        """The last call of the current run, if there was one."""
        return self._run.report.steps[-1] if self._run and self._run.report.steps else None

    def part(self) -> None:
        """Give everything back; conditionings in use keep their prefix alone, as without us."""
        owners = [entry.owner() for entry in self.store]
        self.store.clear()
        for owner in filter(None, owners):
            self._adapter.part(owner)
        self.give_back()

    def give_back(self) -> None:
        """Return freed memory to the driver, where there is one."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.measure()

    def measure(self) -> None:
        """Put what is held into the run's report."""
        if self._run is not None:
            report = self._run.report
            report.entries = len(self.store)
            report.buffer_bytes = self.store.buffer_bytes
            report.graph_bytes = self._capturer.nbytes
            report.peak_bytes = max(report.peak_bytes, self.store.nbytes)

    def stop(self) -> None:
        """Let every further call through; one may still be on its way from another thread."""
        self._adapter = None

    def dispatch(self, call: ModelCall) -> Any:
        """Decide one call of the model and record what became of it."""
        with self.lock:
            if self._adapter is None:
                # Detached by another thread, after this call had come in.
                return call.run_native()
            if self._run is None or (not self._open and self._run.ends_with(call)):
                self._runs += 1
                self._run = begin_run(self._runs, self.mode, self._adapter, call)
            run = self._run
            if call.phase is Phase.PREFILL or not run.report.steps:
                # Between two prefills anything can have been done to the model, even where the
                # second seems to belong to the first one's run.
                run.fallbacks = check_model(self._adapter, self._capturer, call)
            run.begin(call)
            events = None
            gpu = call.device.type == "cuda"
            # Inside somebody else's capture an event would become part of the graph.
            if gpu and not torch.cuda.is_current_stream_capturing():
                events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
                events[0].record(torch.cuda.current_stream(call.device))
            start = time.perf_counter()
            try:
                with self._order.step(None if events is None else call.device):
                    outcome = self._decide(run, call)
            except BaseException as error:
                run.report.error = f"{type(error).__name__}: {first_line(error)}"
                raise
            host_ms = (time.perf_counter() - start) * 1e3
            if events is not None:
                events[1].record(torch.cuda.current_stream(call.device))
            run.record(call, outcome, host_ms, events)
            if outcome.fallback is not None:
                self._log(outcome.fallback)
            return outcome.result

    def _decide(self, run: Run, call: ModelCall) -> Outcome:
        entry = None if call.conditioning is None else self.store.find(call.conditioning)
        failed = False
        try:
            outcome = self._try(run, call, entry)
        except OWN_ERRORS as error:
            failed = True
            outcome = failure(error)
            entry = None if call.conditioning is None else self.store.find(call.conditioning)
            if entry is not None and entry.key.profile == "fast" and outcome.code == "step_failed":
                outcome = self.profiles.give_up_fast(Fallback("fast_failed", outcome.detail))
            run.stop(call, outcome)
        else:
            if isinstance(outcome, Outcome):
                return outcome
            entry = None
        # Outside the handler: the exception's traceback keeps the failed step's tensors alive.
        if entry is not None:
            self.store.drop(entry)
            self.give_back()
        if failed:
            self._adapter.recover()
        kind = Kind.PREFILL if call.phase is Phase.PREFILL else Kind.EAGER
        return Outcome(self._run_native(call), kind, Path.NATIVE, outcome)

    def _run_native(self, call: ModelCall) -> Any:
        """The model's own path; it gets our memory, should it run out of its own."""
        try:
            return call.run_native()
        except torch.OutOfMemoryError:
            if not len(self.store):
                raise
        self.store.clear()
        self.give_back()
        self._adapter.recover()
        return call.run_native()

    def _try(self, run: Run, call: ModelCall, entry: Entry | None) -> Outcome | Fallback:
        """Our own path, or why the model's own must run. The user's wish comes first."""
        if self.mode == "off":
            self.store.drop_idle()
            return Fallback("off")
        if self._disabled is not None:
            return self._disabled
        for fallback in run.fallbacks:
            if fallback.path is Path.NATIVE:
                return fallback
        stop = call_fallback(call.device) or self._adapter.call_fallback(call)
        if stop is not None:
            if call.phase is Phase.PREFILL:
                run.stop(call, stop)
            elif entry is not None and stop.code == "conditioning_changed":
                # Not to be used again, and the model keeps a prefix of its own from now on.
                self.store.drop(entry)
            return stop
        if call.phase is Phase.PREFILL:
            return self._prefill(run, call)
        if entry is None:
            return run.stopped(call) or Fallback("unregistered")
        stop = self._adapter.decode_fallback(call, entry)
        if stop is not None:
            return stop
        self.store.touch(entry)
        outcome = self.steps.run(run, call, entry, graphs=self.mode == "auto")
        if isinstance(outcome, Outcome) and outcome.kind is Kind.CAPTURED:
            self.measure()
        if isinstance(outcome, Fallback):
            if outcome.code == "parity_fast":
                # The exact step is not to blame; but this run's prefixes go with the buffers.
                self.profiles.give_up_fast(outcome)
                run.stop_all(outcome)
            else:
                self._disabled = outcome
            self.store.clear()
        return outcome

    def _prefill(self, run: Run, call: ModelCall) -> Outcome | Fallback:
        adapter = self._adapter
        layout = adapter.layout(call)
        if isinstance(layout, Fallback):
            run.stop(call, layout)
            return layout
        run.describe(call, layout, None)
        key = CacheKey(
            layout,
            call.batch,
            call.dtype,
            call.device,
            call.strides,
            adapter.attention(call),
            numeric_settings(),
            self.profiles.choose(run.report, adapter, call),
        )
        run.report.attention = key.attention
        entry = self.store.acquire(
            key,
            call.conditioning,
            run.report.run,
            adapter.prefix_shape(call, layout),
            lambda: adapter.static_inputs(call, layout),
        )
        if isinstance(entry, Fallback):
            run.stop(call, entry)
            return entry
        result, unfilled = adapter.prefill(call, entry.buffers)
        if unfilled is not None:
            run.stop(call, unfilled)
            self.store.drop(entry)
            return Outcome(result, Kind.PREFILL, Path.NATIVE, unfilled)
        entry.inputs.load(adapter.run_values(call, layout))
        run.describe(call, layout, entry.buffers)
        self.measure()
        return Outcome(result, Kind.PREFILL, Path.BUFFERS)

    def _log(self, fallback: Fallback) -> None:
        """Say a reason once, in the log; the report says it in every run."""
        if fallback.code not in self._logged and not fallback.reason.expected:
            self._logged.add(fallback.code)
            logger.warning("graph cache: %s %s", fallback.sentence, fallback.hint)
