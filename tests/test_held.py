"""What is held, for how long, and who gets it when memory is short."""

import gc
import weakref

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

from graph_cache import GraphCache
from graph_cache.workload import Workload

STEPS = 6


def test_the_least_recently_used_entry_goes_first(model, attach, capturer):
    cache = attach(model, capturer=capturer, max_entries=2)
    works = [Workload(model, [layout]) for layout in (TEXT, SHORTER_TEXT, ONE_REFERENCE)]
    for index in (0, 1, 0, 2, 0):
        works[index].run(STEPS)
    # SHORTER_TEXT made room for ONE_REFERENCE; TEXT was captured once and stayed.
    assert [step.released for step in capturer.steps] == [False, True, False]
    assert len(cache._dispatcher.store) == 2
    assert cache.report().entries == 2


def test_the_byte_budget_is_kept(model, attach, capturer):
    cache = attach(model, capturer=capturer)
    works = [Workload(model, [references(n)]) for n in (1, 2, 3)]
    sizes = []
    for work in works:
        work.run(STEPS)
        sizes.append(cache.report().conditionings[0].buffer_bytes)
    cache.detach()
    limit = sizes[1] + sizes[2] + 40_000
    assert sum(sizes) > limit
    bounded = attach(model, capturer=capturer, max_bytes=limit)
    for work in works:
        expected = work.run(STEPS).outputs
        assert bounded.nbytes <= limit
        bounded.mode = "off"
        assert same(work.run(STEPS).outputs, expected)
        bounded.mode = "auto"
        work.run(STEPS)
        assert bounded.report().counts["replayed"] > 0


def test_a_current_run_is_never_evicted(model, attach, capturer):
    """Guidance with room for one conditioning: the first keeps its buffers to the end."""
    work = Workload(model, [TEXT, SHORTER_TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer, max_entries=1)
    for _ in range(2):
        assert same(work.run(STEPS).outputs, expected)
        paths = {step.conditioning: step.path.value for step in cache.report().steps}
        assert paths == {0: "graph", 1: "native"}
        assert counters_add_up(cache.report(), STEPS, 2)


def test_clear_in_the_middle_of_a_run(model, attach, capturer):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer)
    plain, calls = work.arguments, iter(range(100))

    def clearing(*args):
        if next(calls) == 4:
            cache.clear()
            assert cache.nbytes == 0
        return plain(*args)

    work.arguments = clearing
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().eager_reasons == {"warm_up": 1, "unregistered": 2}
    assert capturer.steps[0].released


def test_detach_in_the_middle_of_a_run(model, capturer):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = GraphCache.attach(model, capturer=capturer)
    plain, calls = work.arguments, iter(range(100))

    def detaching(*args):
        if next(calls) == 4:
            cache.detach()
        return plain(*args)

    work.arguments = detaching
    assert same(work.run(STEPS).outputs, expected)


def test_released_graphs_are_captured_again(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    cache.release_graphs()
    assert capturer.steps[0].released
    work.run(STEPS)
    assert kinds(cache)[:3] == ["prefill", "eager", "captured"]


def test_buffers_are_freed_with_the_cache(model):
    work = Workload(model, [TEXT])
    cache = GraphCache.attach(model, capturer=FakeCapturer())
    work.run(STEPS)
    buffers = [weakref.ref(entry.buffers) for entry in cache._dispatcher.store]
    cache.clear()
    gc.collect()
    assert [reference() for reference in buffers] == [None]
    cache.detach()


def test_no_conditioning_is_kept_alive(model, attach, capturer):
    attach(model, capturer=capturer)
    work = Workload(model, [TEXT])
    kv_cache = work.kv_caches()[0]
    gone = weakref.ref(kv_cache)
    arguments = work.arguments(0, work.latents, 1.0)
    model(**arguments, kv_cache=kv_cache, kv_cache_mode="extract")
    model(**arguments, kv_cache=kv_cache, kv_cache_mode="cached")
    del kv_cache
    gc.collect()
    assert gone() is None
