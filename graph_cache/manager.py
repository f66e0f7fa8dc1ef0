"""The cache of one model, as its users see it."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from .capture import Capturer
from .cuda_graphs import CudaCapturer
from .dispatcher import Dispatcher, Mode
from .entries import Limits
from .layout import Profile
from .models import adapter_for
from .models.base import Adapter
from .reasons import Fallback
from .report import RunReport, Step
from .steps import Verify

logger = logging.getLogger("graph_cache")


class GraphCache:
    """Persistent prefix K/V and CUDA-graph replay for one Qwen-Image-2.1 transformer.

    Made by `attach`. The model's callers change nothing: the first step of a run fills persistent
    buffers, the second runs eagerly over them, the third is captured, all later ones replay.

    Calls from several threads are decided one after the other. As a context manager it detaches
    at the end.
    """

    def __init__(
        self, adapter: Adapter | None, dispatcher: Dispatcher, why_not: Fallback | None
    ) -> None:
        self._adapter = adapter
        self._dispatcher = dispatcher
        self._why_not = why_not

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        *,
        mode: Mode = "auto",
        max_entries: int = 8,
        max_bytes: int | None = None,
        headroom_bytes: int = 2 << 30,
        arrangement: str = "auto",
        verify: Verify = "first",
        profile: Profile = "exact",
        capturer: Capturer | None = None,
    ) -> GraphCache:
        """Put a cache in front of a model.

        Parameters
        ----------
        model
            The transformer, for example ``pipe.transformer``. A model of another kind is left
            alone, and `report` says so.
        mode
            "auto" replays CUDA graphs where it can and uses prefix buffers elsewhere; "buffers"
            never captures; "off" runs the model's own path.
        max_entries
            Conditionings held at once; the least recently used goes first.
        max_bytes
            Bytes of buffers and graphs held at once; None for whatever the device has left.
        headroom_bytes
            Device memory that stays free when buffers are allocated.
        arrangement
            "per_layer", "shared" or "auto", see `graph_cache.prefix.Arrangement`.
        verify
            Bitwise comparison of a decode step with the model's own cached step and of the first
            replay with the decode step, at one extra step each: at the "first" of a kind (target
            size, batch, references or none, ...) in a process, "always", or "never".
        profile
            "exact" gives bit for bit what the model's own cached step gives. "fast" computes the
            same through other kernels: the picture differs by rounding, the report says by how
            much. It joins the weights of a block's projections in memory; `detach` parts them.
        capturer
            Takes the place of the CUDA capturer.

        Raises
        ------
        TypeError
            If ``model`` is no torch module.
        ValueError
            If an option has no such value, or a cache is attached to the model already.
        """
        limits = Limits(max_entries, max_bytes, headroom_bytes, arrangement)
        return cls.over(adapter_for(model), limits, mode, verify, profile, capturer)

    @classmethod
    def over(
        cls,
        found: Adapter | Fallback,
        limits: Limits,
        mode: Mode = "auto",
        verify: Verify = "first",
        profile: Profile = "exact",
        capturer: Capturer | None = None,
    ) -> GraphCache:
        """As `attach`, over an adapter that is made already, or the reason why there is none."""
        adapter = None if isinstance(found, Fallback) else found
        capturer = capturer or CudaCapturer()
        dispatcher = Dispatcher(adapter, mode, verify, limits, capturer, profile)
        if adapter is None:
            logger.warning("graph cache: %s %s", found.sentence, found.hint)
            return cls(None, dispatcher, found)
        adapter.attach(dispatcher.dispatch)
        return cls(adapter, dispatcher, None)

    def __enter__(self) -> GraphCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    @property
    def mode(self) -> Mode:
        """auto, buffers or off; may be set between calls."""
        return self._dispatcher.mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._dispatcher.mode = mode

    @property
    def profile(self) -> Profile:
        """The profile: exact or fast. A change holds from the next prefill on."""
        return self._dispatcher.profiles.asked

    @profile.setter
    def profile(self, profile: Profile) -> None:
        self._dispatcher.profiles.asked = profile

    @property
    def verify(self) -> Verify:
        """first, always or never; may be set between calls."""
        return self._dispatcher.steps.verify

    @verify.setter
    def verify(self, verify: Verify) -> None:
        self._dispatcher.steps.verify = verify

    @property
    def nbytes(self) -> int:
        """Bytes held by buffers and graphs."""
        return self._dispatcher.store.nbytes

    @property
    def entries(self) -> int:
        """Conditionings whose buffers are held."""
        return len(self._dispatcher.store)

    def report(self) -> RunReport:
        """What happened in the last run, or is happening in the current one."""
        with self._dispatcher.lock:
            report = self._dispatcher.report()
            if self._why_not is not None:
                report.note(self._why_not)
            return report

    @property
    def limits(self) -> Limits:
        """Bounds of what is held; may be changed between runs."""
        return self._dispatcher.store.limits

    def open_run(self) -> None:
        """Begin a run; every call belongs to it until `close_run`.

        For a library that tells where a run begins. Without this, the calls tell.
        """
        with self._dispatcher.lock:
            self._dispatcher.open_run()

    def close_run(self) -> RunReport:
        """End the run that was opened, and report it. What it holds stays."""
        with self._dispatcher.lock:
            return self._dispatcher.close_run()

    def last_step(self) -> Step | None:
        """The last call of the current run, if there was one."""
        return self._dispatcher.last_step()

    def release_graphs(self) -> None:
        """Give the graphs' memory back; the buffers stay, the next run captures anew."""
        with self._dispatcher.lock:
            self._dispatcher.store.release_graphs()
            self._dispatcher.give_back()

    def clear(self) -> None:
        """Give all memory back. A run in progress goes on over the model's own path.

        The prefix of such a run stays allocated until its pipeline lets go of it.
        """
        with self._dispatcher.lock:
            self._dispatcher.store.clear()
            self._dispatcher.give_back()

    def detach(self) -> None:
        """Give all memory back and leave the model exactly as it was found. May be repeated.

        Where somebody else has wrapped the model since, our hook stays and lets every call through:
        to take it out would take theirs along.
        """
        with self._dispatcher.lock:
            self.clear()
            if self._adapter is not None:
                self._adapter.detach()
                self._adapter = None
                self._dispatcher.stop()

    def free_after_last_step(
        self, pipe: Any, step: int, timestep: Any, callback_kwargs: dict
    ) -> dict:
        """For a pipeline's ``callback_on_step_end``: give memory back before the VAE decodes.

        All of it but the prefix itself, which the pipeline holds without us too.

        Parameters
        ----------
        pipe
            The pipeline; its ``num_timesteps`` tells the last step.
        step
            Index of the step that has ended.
        timestep, callback_kwargs
            Not used.

        Returns
        -------
        dict
            Empty: no tensor of the loop is replaced.
        """
        with self._dispatcher.lock:
            if self._adapter is not None and step == pipe.num_timesteps - 1:
                self._dispatcher.part()
        return {}
