"""One patched model's runs: opens and closes them around ComfyUI's sampling."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...entries import Limits
from ...errors import OWN_ERRORS, first_line
from ...manager import GraphCache
from ...pace import Pace, native_step_ms, remember_native
from ...reasons import Fallback, Path
from ...report import RunReport
from . import core
from .adapter import ComfyUIAdapter
from .checks import is_native_model
from .options import Live, Options
from .run_context import RunContext

logger = logging.getLogger("graph_cache")

KEY = "qwen_image_graph_cache"
"""Name of our wrappers and callbacks on a ModelPatcher."""

_WRAPPERS = ("outer_sample", "diffusion_model")
_CALLBACKS = ("on_cleanup", "on_detach_after")
"""ComfyUI's names of what we attach to (`comfy.patcher_extension`)."""
_CALLBACK = 5
"""Place of the step callback among the arguments of a sampling run."""


def patch(
    patcher: Any,
    options: Options,
    publish: Callable[[RunReport], None],
    live: Callable[[Live], None] | None = None,
) -> tuple[Any, Runtime | Fallback]:
    """Put a cache in front of a model's sampling.

    Parameters
    ----------
    patcher
        ComfyUI's ModelPatcher; it is not changed.
    options
        What is asked for.
    publish
        Gets the report of every run.
    live
        Gets where a run is, after every step.

    Returns
    -------
    tuple
        A patched clone and what runs it; for another model the patcher itself, and why.
    """
    model = getattr(getattr(patcher, "model", None), "diffusion_model", None)
    if not is_native_model(model):
        return patcher, Fallback("not_qwen21", type(model).__name__)
    runtime = Runtime(options, publish, live)
    clone = patcher.clone()
    # The last node wins: two caches on one model would only hold everything twice.
    for name, wrapper in zip(_WRAPPERS, (runtime.outer_sample, runtime.diffusion_model)):
        clone.remove_wrappers_with_key(name, KEY)
        clone.add_wrapper_with_key(name, KEY, wrapper)
    for name, callback in zip(_CALLBACKS, (runtime.on_cleanup, runtime.on_detach)):
        clone.remove_callbacks_with_key(name, KEY)
        clone.add_callback_with_key(name, KEY, callback)
    return clone, runtime


class Runtime:
    """The wrappers and callbacks of one patched model.

    Parameters
    ----------
    options
        What the node asks for.
    publish, live
        See `patch`.
    """

    def __init__(
        self,
        options: Options,
        publish: Callable[[RunReport], None],
        live: Callable[[Live], None] | None = None,
    ) -> None:
        self.options = options
        self.report: RunReport | None = None
        self._publish = publish
        self._live = live
        self._pace = Pace()
        self._cache: GraphCache | None = None
        self._adapter: ComfyUIAdapter | None = None
        self._model: Callable[[], Any] = lambda: None
        self._patcher: Callable[[], Any] = lambda: None
        self._depth = 0
        self._called = False
        # Tests put one without CUDA here.
        self.capturer = None

    # --- ComfyUI's wrappers and callbacks --------------------------------------------------

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around a whole sampling run, loading the model included."""
        if self._depth:
            # A sampler that samples inside a run: its calls belong to the outer one.
            return executor(*args, **kwargs)
        self._depth += 1
        self._called = False
        opened = self._open(executor.class_obj, args, kwargs)
        if opened:
            args, kwargs = self._watched(args, kwargs)
        error: BaseException | None = None
        try:
            return executor(*args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._depth -= 1
            self._called = False
            if opened:
                self._close(error)

    def diffusion_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around each call of the transformer."""
        ours = self._depth and executor.class_obj is self._model()
        if not ours or torch.compiler.is_compiling():
            return executor(*args, **kwargs)
        core.raise_if_interrupted()
        if not self._called:
            # Loading the model is over.
            self._pace = Pace()
        self._called = True
        inner = executor.wrappers[executor.idx + 1 :]
        names = ", ".join(getattr(wrapper, "__qualname__", repr(wrapper)) for wrapper in inner)
        return self._adapter.receive(executor, args, kwargs, names)

    def on_cleanup(self, patcher: Any, *args: Any) -> None:
        """ComfyUI has ended a run."""
        # Inside a run of ours it is closed, reported and released by `outer_sample`.
        if not self._depth and not self.options.keep_between_runs:
            self.release()

    def on_detach(self, patcher: Any, unpatch_all: bool = True, *args: Any) -> None:
        """ComfyUI has unloaded the model, or loads another clone of it (``unpatch_all`` false).

        A run's own loading detaches its patcher that way too, and what is kept stays then.
        """
        # A clone that nobody needs any more says so too, whatever runs meanwhile.
        of_the_run = self._called and patcher is self._patcher()
        kept = self._depth or self.options.keep_between_runs
        if unpatch_all or of_the_run or not kept:
            self.release()

    @property
    def held_bytes(self) -> int:
        """Bytes of buffers and graphs held now."""
        return 0 if self._cache is None else self._cache.nbytes

    @property
    def held_entries(self) -> int:
        """Conditionings whose buffers are held now."""
        return 0 if self._cache is None else self._cache.entries

    def release(self) -> None:
        """Give buffers and graphs back. A run in progress goes on over the model's own path."""
        if self._cache is not None:
            self._cache.clear()

    # --- a run -----------------------------------------------------------------------------

    def _open(self, guider: Any, args: tuple, kwargs: dict) -> bool:
        """Open a run; whatever goes wrong here must not keep the picture from being made."""
        try:
            patcher = guider.model_patcher
            sigmas = kwargs["sigmas"] if "sigmas" in kwargs else args[3]
            self._patcher = weakref.ref(patcher)
            self._attach(patcher.model.diffusion_model)
            self._cache.limits.headroom_bytes = core.headroom_bytes()
            steps = max(0, len(sigmas) - 1)
            sampler = kwargs["sampler"] if "sampler" in kwargs else args[2]
            self._adapter.begin_run(self._context(guider, steps, sampler))
            self._cache.open_run()
            self._pace = Pace()
        except (*OWN_ERRORS, ImportError) as error:
            logger.warning("graph cache: the model is left alone", exc_info=error)
            self._model = lambda: None
            report = RunReport(mode=self.options.mode)
            report.note(Fallback("step_failed", first_line(error)))
            self._finish(report)
            return False
        return True

    def _context(self, guider: Any, steps: int, sampler: Any) -> RunContext:
        function = getattr(sampler, "sampler_function", sampler)
        held = [value for value in vars(guider).values() if hasattr(value, "load_device")]
        return RunContext(
            guider.model_patcher,
            guider.model_options,
            steps,
            self.options.min_steps,
            tuple(held),
            KEY,
            core_sampler=type(guider).__module__.partition(".")[0] in ("comfy", "comfy_extras"),
            sampler=getattr(function, "__name__", type(function).__name__),
        )

    def _attach(self, model: Any) -> None:
        if self._cache is not None and self._model() is model:
            return
        if self._cache is not None:
            self._cache.detach()
        adapter = ComfyUIAdapter(model)
        limits = Limits(max_bytes=self.options.max_bytes)
        self._cache = GraphCache.over(
            adapter,
            limits,
            self.options.mode,
            self.options.verify,
            self.options.profile,
            self.capturer,
        )
        self._adapter, self._model = adapter, weakref.ref(model)

    def _close(self, error: BaseException | None) -> None:
        report = self._cache.close_run()
        if error is not None and report.error is None:
            report.error = f"{type(error).__name__}: {first_line(error)}"
        try:
            self._complete(report)
        except OWN_ERRORS as raised:
            logger.warning("graph cache: the report is not complete", exc_info=raised)
        self._adapter.end_run()
        if not self.options.keep_between_runs:
            self.release()
        self._finish(report)

    def _finish(self, report: RunReport) -> None:
        self.report = report
        try:
            self._publish(report)
        except OWN_ERRORS as error:
            logger.warning("graph cache: the run could not be reported", exc_info=error)

    # --- how fast it goes ------------------------------------------------------------------

    def _watched(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The sampling run's arguments, with a callback of ours around the one in them."""
        if "callback" in kwargs:
            return args, {**kwargs, "callback": self._callback(kwargs["callback"])}
        if len(args) > _CALLBACK:
            watched = self._callback(args[_CALLBACK])
            return (*args[:_CALLBACK], watched, *args[_CALLBACK + 1 :]), kwargs
        return args, kwargs

    def _callback(self, theirs: Callable[..., Any] | None) -> Callable[..., Any]:
        def callback(step: int, denoised: Any, latent: Any, steps: int, *more: Any) -> Any:
            step_ms = self._pace.tick()
            self._tell(step + 1, steps, step_ms)
            return None if theirs is None else theirs(step, denoised, latent, steps, *more)

        return callback

    def _tell(self, step: int, steps: int, step_ms: float) -> None:
        last = self._cache.last_step()
        if self._live is None or last is None:
            return
        mode, kind, path = self.options.mode, last.kind.value, last.path.value
        try:
            self._live(Live(mode, step, steps, step_ms, kind, path))
        except OWN_ERRORS as error:
            logger.warning("graph cache: a step could not be reported", exc_info=error)
            self._live = None

    def _complete(self, report: RunReport) -> None:
        """What only this side knows: times of steps, and what the weights are."""
        report.planned_steps = self._adapter.planned_steps
        report.finished_steps = self._pace.steps
        report.step_ms = self._pace.step_ms
        streamed = "weights_streamed" in report.fallbacks
        place = "streamed" if streamed else self._adapter.weights_place()
        report.weights = ", ".join(filter(None, (self._adapter.describe_weights(), place)))
        workload = self._adapter.workload()
        if report.path is Path.NATIVE and report.step_ms is not None and report.error is None:
            remember_native(workload, report.step_ms)
        report.native_step_ms = native_step_ms(workload)
