"""Attach, detach, runs, and what the cache holds between them."""

import gc
import threading
import weakref

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from helpers import (
    ONE_REFERENCE,
    SHORTER_TEXT,
    TEXT,
    FakeCapturer,
    counters_add_up,
    references,
    same,
)

from graph_cache import GraphCache
from graph_cache.layout import SequenceLayout
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

STEPS = 6


# --- the door ---------------------------------------------------------------------------------


def test_detach_leaves_the_model_exactly_as_found(model):
    before = dict(vars(model))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    cache = GraphCache.attach(model)
    Workload(model, [TEXT]).run(3)
    cache.detach()
    cache.detach()
    assert vars(model) == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_detach_leaves_other_peoples_hooks(model):
    registry = HookRegistry.check_if_exists_or_initialize(model)
    fired = []

    class Noting(ModelHook):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def pre_forward(self, module, *args, **kwargs):
            fired.append(self.name)
            return args, kwargs

    registry.register_hook(Noting("before"), "before")
    cache = GraphCache.attach(model)
    registry.register_hook(Noting("after"), "after")
    cache.detach()
    Workload(model, [TEXT]).run(1)
    assert fired == ["after", "before"]
    # Ours could not be taken out from between them; it lets calls through, and can be used again.
    again = GraphCache.attach(model)
    Workload(model, [TEXT]).run(1)
    assert again.report().calls == 1
    again.detach()


def test_detach_leaves_a_forward_that_was_patched_afterwards(model):
    from accelerate.hooks import ModelHook as AccelerateHook
    from accelerate.hooks import add_hook_to_module

    fired = []

    class Noting(AccelerateHook):
        def pre_forward(self, module, *args, **kwargs):
            fired.append(1)
            return args, kwargs

    cache = GraphCache.attach(model)
    add_hook_to_module(model, Noting())
    cache.detach()
    Workload(model, [TEXT]).run(2)
    assert len(fired) == 2


def test_two_caches_on_one_model_are_refused(model, attach):
    cache = attach(model)
    with pytest.raises(ValueError, match="attached to this model already"):
        GraphCache.attach(model)
    Workload(model, [TEXT]).run(3)
    assert cache.report().calls == 3


def test_it_detaches_as_a_context_manager(model):
    before = dict(vars(model))
    with GraphCache.attach(model) as cache:
        Workload(model, [TEXT]).run(3)
        assert cache.nbytes > 0
    assert cache.nbytes == 0
    assert vars(model) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode must be"),
        ({"verify": "sometimes"}, "verify must be"),
        ({"max_entries": 0}, "max_entries must be"),
        ({"max_bytes": -1}, "max_bytes must be"),
        ({"headroom_bytes": -1}, "headroom_bytes must"),
        ({"arrangement": "per_head"}, "arrangement must be"),
    ],
)
def test_options_that_make_no_sense_are_refused(model, options, message):
    before = dict(vars(model))
    with pytest.raises(ValueError, match=message):
        GraphCache.attach(model, **options)
    assert vars(model) == before


def test_something_that_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"such as pipe.transformer, got str"):
        GraphCache.attach("Qwen/Qwen-Image-2.1")


def test_calls_by_position_are_understood(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    arguments = work.arguments(0, work.latents, 1.0)
    kv_cache = work.kv_caches()[0]
    positional = [
        arguments[name]
        for name in (
            "hidden_states",
            "encoder_hidden_states",
            "timestep",
            "img_shapes",
            "img_mask",
        )
    ]
    result = model(*positional, kv_cache=kv_cache, kv_cache_mode="extract")
    assert result.sample.shape[1] == TEXT.prefix_tokens + TEXT.target_tokens
    result = model(*positional, kv_cache=kv_cache, kv_cache_mode="cached")
    assert result.sample.shape == work.latents.shape
    assert cache.report().calls == 2


@pytest.mark.parametrize(
    "wrong",
    [{"kv_cache_mode": "extracted"}, {"nonsense": 1}, {"hidden_states": None}, {"img_mask": None}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_bad_calls_get_the_models_own_error(wrong, model, attach, capturer):
    work = Workload(model, [TEXT])

    def call():
        arguments = work.arguments(0, work.latents, 1.0)
        arguments |= {"kv_cache": work.kv_caches()[0], "kv_cache_mode": "extract"}
        model(**{**arguments, **wrong})

    with pytest.raises((ValueError, TypeError, AttributeError)) as theirs:
        call()
    attach(model, capturer=capturer)
    with pytest.raises(theirs.type) as ours:
        call()
    assert str(ours.value) == str(theirs.value)


# --- runs -------------------------------------------------------------------------------------


def kinds(cache):
    return [step.kind.value for step in cache.report().steps]


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


# --- weights ----------------------------------------------------------------------------------


def test_changed_weights_are_captured_anew(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    linear = model.transformer_blocks[0].attn.to_q
    old = linear.weight
    linear.weight = torch.nn.Parameter(old * 0.5, requires_grad=False)
    ours = work.run(STEPS).outputs
    assert kinds(cache)[1:3] == ["eager", "captured"]
    assert cache.report().eager_reasons == {"weights_changed": 1}
    assert capturer.steps[0].released
    cache.mode = "off"
    assert same(ours, work.run(STEPS).outputs)


def test_weights_changed_in_place_need_no_capture(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    model.transformer_blocks[0].attn.to_q.weight.mul_(0.5)
    ours = work.run(STEPS).outputs
    assert kinds(cache) == ["prefill", *["replayed"] * (STEPS - 1)]
    cache.mode = "off"
    assert same(ours, work.run(STEPS).outputs)


def test_old_weights_are_not_kept_alive(model, attach, capturer):
    attach(model, capturer=capturer)
    Workload(model, [TEXT]).run(STEPS)
    linear = model.transformer_blocks[0].attn.to_q
    old = weakref.ref(linear.weight)
    linear.weight = torch.nn.Parameter(linear.weight.clone(), requires_grad=False)
    gc.collect()
    assert old() is None


def test_the_memory_layout_of_latents_counts(model, attach, capturer):
    """The pipeline's latents are transposed; contiguous ones may round otherwise."""
    work = Workload(model, [TEXT])
    assert not work.latents.is_contiguous()
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    (entry,) = cache._dispatcher.store
    assert entry.inputs["hidden"].stride() == work.latents.stride()
    work.latents = work.latents.contiguous()
    ours = work.run(STEPS).outputs
    assert len(cache._dispatcher.store) == 2
    cache.mode = "off"
    assert same(ours, work.run(STEPS).outputs)


def test_changed_torch_settings_are_another_entry(model, attach, capturer, monkeypatch):
    """A graph would go on with the attention kernel of its capture."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cache = attach(model, capturer=capturer)
    work = Workload(model, [TEXT])
    work.run(STEPS)
    with sdpa_kernel(SDPBackend.MATH):
        ours = work.run(STEPS).outputs
        assert cache.report().captures == 1
        assert len(cache._dispatcher.store) == 2
        cache.mode = "off"
        assert same(ours, work.run(STEPS).outputs)


def test_what_parity_turns_off_holds_no_memory(model, attach, capturer, monkeypatch):
    from graph_cache.models import diffusers_step

    real = diffusers_step.decode
    monkeypatch.setattr(diffusers_step, "decode", lambda *args: real(*args) * 2)
    cache = attach(model, capturer=capturer)
    Workload(model, [TEXT]).run(STEPS)
    assert cache.report().eager_reasons == {"parity": STEPS - 1}
    assert cache.nbytes == 0


def test_another_dtype_is_another_entry(attach, capturer):
    model = tiny_transformer()
    cache = attach(model, capturer=capturer)
    Workload(model, [TEXT]).run(STEPS)
    torch.nn.Module.to(model, torch.bfloat16)
    work = Workload(model, [TEXT])
    ours = work.run(STEPS).outputs
    assert len(cache._dispatcher.store) == 2
    cache.mode = "off"
    assert same(ours, work.run(STEPS).outputs)


# --- what is held -----------------------------------------------------------------------------


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


# --- several at once, and what a run leaves behind -----------------------------------------------


class _Pipe:
    num_timesteps = STEPS


def step_of(work, kv_cache, latents, step):
    arguments = work.arguments(0, latents, 1 - step / STEPS)
    mode = "cached" if step else "extract"
    output = work.model(**arguments, kv_cache=kv_cache, kv_cache_mode=mode)[0]
    return output[:, -latents.shape[1] :]


@pytest.mark.parametrize("arrangement", ["per_layer", "shared"])
def test_a_pipeline_that_is_done_leaves_another_its_prefix(arrangement, model, attach, capturer):
    works = [Workload(model, [TEXT], seed=seed) for seed in range(2)]
    expected = [work.run(STEPS).outputs for work in works]
    cache = attach(model, capturer=capturer, arrangement=arrangement)
    caches = [work.kv_caches()[0] for work in works]
    latents = [work.latents for work in works]
    # The first is one step ahead, so that it is done before the second.
    order = [(0, 0), *(pair for step in range(STEPS - 1) for pair in ((1, step), (0, step + 1)))]
    for index, step in order:
        output = step_of(works[index], caches[index], latents[index], step)
        assert same([output], [expected[index][step]])
        latents[index] = latents[index] - output / STEPS
        if index == 0:
            cache.free_after_last_step(_Pipe, step, None, {})
    assert cache.nbytes == 0
    output = step_of(works[1], caches[1], latents[1], STEPS - 1)
    assert same([output], [expected[1][-1]])
    for layer in caches[1].layer_caches:
        assert layer.k.untyped_storage().nbytes() == layer.k.nbytes


def test_every_prefill_looks_the_model_over(model, attach, capturer):
    """A run cancelled after its prefill, its traceback kept: the next must not be taken for it."""
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    kept = work.kv_caches()[0]
    step_of(work, kept, work.latents, 0)
    handle = model.transformer_blocks[1].attn.register_forward_hook(
        lambda module, args, output: output * 0.5
    )
    ours = work.run(STEPS).outputs
    assert "module_hooks" in cache.report().fallbacks
    cache.mode = "off"
    assert same(ours, work.run(STEPS).outputs)
    handle.remove()


def test_the_model_gets_our_memory_when_it_runs_out_of_its_own(model, attach, capturer):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    assert cache.nbytes > 0
    plain = type(model.proj_out).forward

    class Hungry(type(model.proj_out)):
        def forward(self, hidden):
            if cache.nbytes:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return plain(self, hidden)

    kept = model.proj_out.__class__
    model.proj_out.__class__ = Hungry
    cache.mode = "buffers"
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().calls == STEPS
    model.proj_out.__class__ = kept


def test_out_of_memory_without_memory_of_ours_is_the_models_own(model, attach, capturer):
    cache = attach(model, capturer=capturer, mode="off")

    class Hungry(type(model.proj_out)):
        def forward(self, hidden):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")

    model.proj_out.__class__ = Hungry
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB"):
        Workload(model, [TEXT]).run(STEPS)
    assert "3 GiB" in cache.report().error


def test_one_conditioning_prefilled_twice(model, attach, capturer):
    """The same K/V cache object for two layouts in turn, as a user who keeps it might."""
    works = [Workload(model, [layout]) for layout in (TEXT, SHORTER_TEXT, TEXT)]
    expected = [work.run(STEPS).outputs for work in works]
    cache = attach(model, capturer=capturer)
    kept = works[0].kv_caches()
    for work, theirs in zip(works, expected):
        work.kv_caches = lambda: kept
        assert same(work.run(STEPS).outputs, theirs)
        assert "prefix_replaced" not in cache.report().fallbacks
    assert cache.report().counts["replayed"] == STEPS - 1


def test_another_mask_is_another_layout(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    kv_cache = work.kv_caches()[0]
    step_of(work, kv_cache, work.latents, 0)
    mask, embeds = work.masks[0], work.prompts[0]
    work.masks[0] = torch.cat([torch.zeros(1, 2, dtype=torch.bool), mask], dim=1)
    work.prompts[0] = torch.cat([embeds[:, :2], embeds], dim=1)
    ours = step_of(work, kv_cache, work.latents, 1)
    assert cache.report().eager_reasons == {"layout_changed": 1}
    cache.mode = "off"
    assert same([ours], [step_of(work, kv_cache, work.latents, 1)])


def test_a_passing_lack_of_memory_is_tried_again_in_the_next_run(model, attach, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    capturer.error = torch.OutOfMemoryError("CUDA out of memory.")
    work.run(STEPS)
    assert cache.report().eager_reasons == {"warm_up": 1, "vram_graph": STEPS - 2}
    capturer.error = None
    work.run(STEPS)
    assert cache.report().counts["captured"] == 1


def test_an_adapter_switched_on_in_the_middle_of_a_run(model, attach, capturer):
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    model.requires_grad_(False)
    model.disable_adapters()
    work = Workload(model, [TEXT])
    plain, calls = work.arguments, iter(range(100))

    def switching(*args):
        step = next(calls) % STEPS
        if step == 0:
            model.disable_adapters()
        elif step == 4:
            model.enable_adapters()
        return plain(*args)

    work.arguments = switching
    expected = work.run(STEPS).outputs
    cache = attach(model, capturer=capturer)
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().eager_reasons == {"warm_up": 1, "lora_dynamic": STEPS - 4}


def test_a_module_without_weights_that_is_replaced(model, attach, capturer):
    """The activation between two runs: the graph of the old one must go."""
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    for block in model.transformer_blocks:
        block.img_mlp.activation_fn = torch.nn.GELU()
    ours = work.run(STEPS).outputs
    assert cache.report().eager_reasons == {"weights_changed": 1}
    cache.mode = "off"
    assert same(ours, work.run(STEPS).outputs)


def test_headroom_is_left_free(model, attach, capturer, monkeypatch):
    """Enough for the buffers alone, and not for the headroom besides."""
    monkeypatch.setattr("graph_cache.entries.available_bytes", lambda *args: 10 << 20)
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer, headroom_bytes=(10 << 20) - 1000)
    work.run(STEPS)
    assert cache.report().eager_reasons == {"vram": STEPS - 1}
    cache.detach()
    cache = attach(model, capturer=capturer, headroom_bytes=1 << 20)
    work.run(STEPS)
    assert cache.report().counts["captured"] == 1


def test_guidance_with_a_foreign_kv_cache_is_one_run(model, attach, capturer):
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    class Foreign(QwenImage21KVCache):
        pass

    work = Workload(model, [TEXT, SHORTER_TEXT])
    work.kv_caches = lambda: [Foreign(len(model.transformer_blocks)) for _ in range(2)]
    cache = attach(model, capturer=capturer)
    work.run(STEPS)
    assert counters_add_up(cache.report(), STEPS, 2)


def test_endless_calls_without_kv_cache_do_not_fill_the_memory(model, attach, capturer):
    from graph_cache import run

    cache = attach(model, capturer=capturer)
    work = Workload(model, [TEXT])
    work.run(run._LONG_RUN + 5, cached=False)
    assert cache.report().calls == 5
