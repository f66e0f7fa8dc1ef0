"""What a run is, step by step: prefill, warm-up, capture, replay, and what disturbs it."""

import gc
import threading

import pytest
import torch
from helpers import (
    ONE_REFERENCE,
    SHORTER_TEXT,
    TEXT,
    FakeCapturer,
    counters_add_up,
    kinds,
    references,
    same,
)

from graph_cache.layout import SequenceLayout
from graph_cache.workload import Workload

STEPS = 6


def test_prefill_then_warm_up_then_capture_then_replay(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    assert kinds(cache) == ["prefill", "eager", "captured", *["replayed"] * (STEPS - 3)]
    assert cache.report().eager_reasons == {"warm_up": 1}
    work.run(STEPS)
    assert kinds(cache) == ["prefill", *["replayed"] * (STEPS - 1)]
    assert cache.report().run == 2
    assert cache.report().captures == 0


def test_a_capture_costs_no_extra_step(model, attach, capturer, monkeypatch):
    from graph_cache.models import diffusers_step

    bodies = []
    real = diffusers_step.decode
    monkeypatch.setattr(diffusers_step, "decode", lambda *args: (bodies.append(1), real(*args))[1])
    attach(model, capturer=capturer, verify="never")
    Workload(model, [TEXT]).run(STEPS)
    # The stand-in runs the body at each replay; so: one a step after the prefill, no more.
    assert len(bodies) == STEPS - 1


@pytest.mark.parametrize(("verify", "extra"), [("never", 0), ("first", 1), ("always", 1)])
def test_the_first_step_is_compared_once(verify, extra, model, attach, capturer, monkeypatch):
    from diffusers.models.transformers import transformer_qwenimage21 as qwen

    native = []
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer, verify=verify)
    prepare = qwen._qwenimage21_prepare_qkv

    def counting(attn, hidden, rope, layer_cache, mode, where):
        if attn is model.transformer_blocks[0].attn:
            native.append(mode)
        return prepare(attn, hidden, rope, layer_cache, mode, where)

    # What the model's own processors call, and our step does not.
    monkeypatch.setattr(qwen, "_qwenimage21_prepare_qkv", counting)
    work.run(STEPS)
    assert native.count("cached") == extra
    assert cache.report().verified == ({} if verify == "never" else {"body": True, "replay": True})
    work.run(STEPS)
    assert native.count("cached") == extra


def test_each_kind_of_step_is_compared_once_in_a_process(model, attach, capturer):
    """Another prompt is of the same kind; another batch, target or a reference is not."""
    cache = attach(model, capturer=capturer, verify="first", arrangement="shared")
    wider = SequenceLayout((7,), (), (1, 4, 8))
    works = [
        (Workload(model, [TEXT]), True),
        (Workload(model, [SHORTER_TEXT]), False),
        (Workload(model, [TEXT], batch=2), True),
        (Workload(model, [wider]), True),
        (Workload(model, [ONE_REFERENCE]), True),
        (Workload(model, [references(2)]), False),
    ]
    for work, compared in works:
        work.run(STEPS)
        assert cache.report().counts["captured"] == 1
        assert cache.report().verified == ({"body": True, "replay": True} if compared else {})


def test_a_failed_comparison_is_not_taken_for_done(model, attach, monkeypatch):
    """With verify="first", a second cache of the process must find the fault again."""
    from graph_cache.models import diffusers_step

    real = diffusers_step.decode
    monkeypatch.setattr(diffusers_step, "decode", lambda *args: real(*args) * 2)
    for _ in range(2):
        cache = attach(model, verify="first", capturer=FakeCapturer())
        Workload(model, [TEXT]).run(STEPS)
        assert cache.report().eager_reasons == {"parity": STEPS - 1}
        cache.detach()


def test_a_run_of_one_step_is_a_run(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    for number in (1, 2, 3):
        work.run(1)
        assert cache.report().run == number
        assert kinds(cache) == ["prefill"]


def test_runs_with_and_without_kv_cache_are_told_apart(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    work.run(STEPS, cached=False)
    assert cache.report().run == 2
    assert cache.report().eager_reasons == {"no_kv_cache": STEPS}
    work.run(STEPS)
    assert cache.report().run == 3
    assert counters_add_up(cache.report(), STEPS)


def test_the_mode_can_be_changed_at_any_step(model, attach, capturer):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer)
    modes = iter(["auto", "auto", "auto", "off", "buffers", "auto"])
    plain = work.arguments

    def switching(*args):
        cache.mode = next(modes)
        return plain(*args)

    work.arguments = switching
    assert same(work.run(STEPS).outputs, expected)
    assert kinds(cache) == ["prefill", "eager", "captured", "eager", "eager", "replayed"]
    with pytest.raises(ValueError, match="mode must be"):
        cache.mode = "on"


def test_a_cancelled_run_leaves_the_next_one_clean(model, attach, capturer):
    class Cancelled(BaseException):
        pass

    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    plain, calls = work.arguments, iter(range(100))

    def cancelling(*args):
        if next(calls) == 3:
            raise Cancelled
        return plain(*args)

    work.arguments = cancelling
    # Caught like this the traceback keeps the run's K/V cache alive, as a notebook does.
    with pytest.raises(Cancelled) as caught:
        work.run(STEPS)
    work.arguments = plain
    assert same(work.run(STEPS).outputs, expected)
    assert len(cache._dispatcher.store) == 2
    del caught
    gc.collect()
    assert same(work.run(STEPS).outputs, expected)
    assert counters_add_up(cache.report(), STEPS)


def test_an_interrupt_inside_a_step_passes_through(model, attach, capturer):
    class Interrupted(BaseException):
        pass

    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer)
    linear = model.transformer_blocks[1].attn.to_q
    plain, calls = type(linear).forward, iter(range(100))

    class Interrupting(type(linear)):
        def forward(self, hidden):
            if next(calls) == 3:
                raise Interrupted("by the user")
            return plain(self, hidden)

    kept = linear.__class__
    linear.__class__ = Interrupting
    with pytest.raises(Interrupted):
        work.run(STEPS)
    assert cache.report().error == "Interrupted: by the user"
    linear.__class__ = kept
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().error is None


def test_errors_of_the_model_itself_are_not_hidden(model, attach, capturer):
    work = Workload(model, [TEXT])
    attach(model, capturer=capturer)
    model.transformer_blocks[0].attn.to_q = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        work.run(STEPS)


def test_calls_from_two_threads(model, attach, capturer):
    works = [Workload(model, [TEXT], seed=seed) for seed in range(2)]
    expected = [work.run(STEPS).outputs for work in works]
    attach(model, capturer=capturer)
    results = [None, None]

    def go(index):
        with torch.no_grad():
            results[index] = works[index].run(STEPS).outputs

    threads = [threading.Thread(target=go, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(same, results, expected))
