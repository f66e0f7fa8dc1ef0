"""What other nodes and tight memory can do to a run, each once met or thought of in a review."""

import gc

import pytest
import torch
from helpers import counters_add_up

pytestmark = pytest.mark.filterwarnings("ignore")


def before_calls(patcher, events, kind="apply_model"):
    """A clone of a model with something done before some of a run's calls, by number."""
    clone, calls = patcher.clone(), []

    def wrapper(executor, *args, **kwargs):
        calls.append(1)
        replaced = events.get(len(calls), lambda *given: None)(*args)
        return executor(*(args if replaced is None else replaced), **kwargs)

    clone.add_wrapper_with_key(kind, "theirs", wrapper)
    return clone, calls


def other_prompt(scale=2.0):
    def change(x, t, c_concat, c_crossattn, *more):
        return x, t, c_concat, c_crossattn * scale, *more

    return change


# --- the prompt --------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [3, 5])
def test_a_prompt_that_another_node_changes_late(bench, capturer, at):
    """The model compares its content at every step; so does the cache, where anybody could."""
    events = dict.fromkeys(range(at, 8), other_prompt())
    theirs, calls = before_calls(bench.patcher, events)
    expected = bench.sample(theirs, steps=7)
    calls.clear()
    ours, runtime = bench.patch(theirs, capturer=capturer, verify="first")
    held = []
    ours.add_wrapper_with_key(
        "apply_model",
        "look",
        lambda call, *a, **k: (held.append(runtime.held_bytes), call(*a, **k))[1],
    )
    assert torch.equal(bench.sample(ours, steps=7), expected)
    assert bench.report.eager_reasons["conditioning_changed"] == 8 - at
    # What cannot be used any more is not held.
    assert held[at] == 0 < held[at - 1]


def test_content_is_compared_once_where_nobody_can_change_it(bench, capturer, monkeypatch):
    compared = []
    equal = torch.equal
    ours, _ = bench.patch(capturer=capturer, verify="never")
    from graph_cache.models.comfyui import calls

    counting = type("Counting", (), {"equal": lambda a, b: compared.append(1) or equal(a, b)})
    counting.Tensor = torch.Tensor
    monkeypatch.setattr(calls, "torch", counting)
    bench.sample(ours, steps=7)
    assert len(compared) == 1


def test_one_prompt_for_both_sides(bench, capturer, monkeypatch):
    """The model finds the second in its cache, so there is nothing to lift: ours computes it."""
    from workbench import prompt

    huge = lambda *sizes, **more: 1e18  # noqa: E731
    monkeypatch.setattr(bench.patcher.model, "memory_required", huge, raising=False)
    job = {"positive": prompt(1), "negative": prompt(1), "cfg": 3.0}
    ours, _ = bench.patch(capturer=capturer)
    assert torch.equal(bench.sample(ours, **job), bench.sample(**job))
    assert bench.report.counts["prefill"] == 2
    assert not {"structure_unknown", "unregistered"} & set(bench.report.fallbacks)


def test_areas_and_time_ranges(bench, capturer):
    import node_helpers
    from workbench import prompt

    def within(seed, **values):
        return node_helpers.conditioning_set_values(prompt(seed), values)

    area = {"strength": 0.7, "set_area_to_bounds": False}
    positive = prompt(1) + within(3, area=(4, 4, 0, 0), **area)
    positive += within(4, area=(4, 4, 2, 0), **area)
    positive += within(5, start_percent=0.4, end_percent=1.0)
    job = {"positive": positive, "negative": prompt(2), "cfg": 2.0, "size": (8, 6), "steps": 8}
    ours, _ = bench.patch(capturer=capturer)
    assert torch.equal(bench.sample(ours, **job), bench.sample(**job))
    assert bench.report.path.value == "graph"


# --- the model's code --------------------------------------------------------------------------


def test_an_attention_that_works_in_place(bench, capturer):
    """It gets a copy, as from the model itself; the prefix is needed at the next step."""
    from workbench import prompt

    def theirs(function, query, key, value, heads, *more, **how):
        key.mul_(0.5)
        return function(query, key, value, heads, *more, **how)

    patcher = bench.patcher.clone()
    patcher.model_options.setdefault("transformer_options", {})
    patcher.model_options["transformer_options"]["optimized_attention_override"] = theirs
    job = {"positive": prompt(1, tokens=60, references=3)}
    ours, _ = bench.patch(patcher, capturer=capturer, verify="first")
    assert torch.equal(bench.sample(ours, **job), bench.sample(patcher, **job))
    assert bench.report.conditionings[0].arrangement == "per_layer"
    assert "attention_override" in bench.report.fallbacks


def test_an_attention_replaced_in_the_models_own_module(bench, capturer, monkeypatch):
    import sys

    module = sys.modules[type(bench.model).__module__]
    original = module.optimized_attention

    def sage(*args, **how):
        return 0.9 * original(*args, **how)

    monkeypatch.setattr(module, "optimized_attention", sage)
    ours, _ = bench.patch(capturer=capturer)
    assert torch.equal(bench.sample(ours), bench.sample())
    assert bench.report.path.value == "buffers"
    assert bench.report.fallbacks["attention_backend"].detail == "sage"


def test_a_later_model_with_a_further_argument(bench, capturer):
    def boosted(executor, *args, **kwargs):
        return executor(*args, **kwargs, boost=torch.ones(1))

    patcher = bench.patcher.clone()
    patcher.add_wrapper_with_key("apply_model", "boost", boosted)
    ours, _ = bench.patch(patcher, capturer=capturer)
    assert torch.equal(bench.sample(ours), bench.sample(patcher))
    assert bench.report.fallbacks["structure_unknown"].detail == "the model is called with boost"


def test_calls_of_another_form_are_counted(bench, capturer):
    def by_name(executor, *args, **kwargs):
        return executor(*args[:5], transformer_options=args[5], **kwargs)

    patcher = bench.patcher.clone()
    patcher.add_wrapper_with_key("diffusion_model", "theirs", by_name)
    ours, _ = bench.patch(patcher, capturer=capturer)
    assert torch.equal(bench.sample(ours), bench.sample(patcher))
    assert counters_add_up(bench.report, 5)
    assert bench.report.eager_reasons == {"structure_unknown": 5}


def test_a_core_that_captures_the_blocks_itself(bench, capturer):
    class Graphed(type(bench.model)):
        def _forward(self, *args, **kwargs):
            # As `prefetch_queue_pop(..., enable_graph=True)` would stand here.
            return super()._forward(*args, **kwargs)

    bench.model.__class__ = Graphed
    ours, _ = bench.patch(capturer=capturer)
    assert torch.equal(bench.sample(ours), bench.sample())
    assert set(bench.report.fallbacks) == {"core_graphs"}


def test_a_patch_at_the_first_step_only(bench, capturer):
    """The reason of the prefill is the reason of all that follows from it."""

    def patched(x, timestep, context, references, slots, options):
        options = {**options, "patches": {"single_block": [lambda given: given]}}
        return x, timestep, context, references, slots, options

    patcher, calls = before_calls(bench.patcher, {1: patched}, "diffusion_model")
    expected = bench.sample(patcher)
    calls.clear()
    ours, _ = bench.patch(patcher, capturer=capturer)
    assert torch.equal(bench.sample(ours), expected)
    assert {step.reason for step in bench.report.steps} == {"block_patches"}


# --- weights and memory ------------------------------------------------------------------------


def test_weights_taken_away_before_the_capture(bench, capturer):
    """Capturing over weights that have to be brought from the host ends the process at worst."""
    linear = bench.model.transformer_blocks[0].attn.to_q

    def evict(*given):
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        linear.weight_function = [lambda weight: weight]

    ours, _ = bench.patch(capturer=capturer)
    ours, _ = before_calls(ours, {5: evict})
    bench.sample(ours, steps=7)
    kinds = [(step.kind.value, step.reason) for step in bench.report.steps]
    assert kinds[3:] == [("replayed", None)] + [("eager", "weight_functions")] * 3
    assert capturer.steps[0].released


def test_no_comparison_with_a_step_that_computes_everything_anew(bench, capturer, monkeypatch):
    """Without room for its cache the model rounds otherwise: that is no fault of ours."""
    if bench.kind == "standin":
        pytest.skip("needs the native model (COMFYUI_PATH); the stand-in always has room")
    from workbench import prompt

    kept = type(bench.model).select_prefix_cache
    stored = []

    def tight(self, key, *more):
        cache = self.prefix_cache
        if cache is not None and cache.select(key, create=False):
            return cache, cache.filled(len(self.transformer_blocks))
        stored.append(1)
        return kept(self, key, *more) if len(stored) <= 2 else (None, False)

    monkeypatch.setattr(type(bench.model), "select_prefix_cache", tight)
    job = {"positive": prompt(2, tokens=131, references=1), "negative": prompt(3, tokens=77)}
    job |= {"cfg": 3.0, "size": (24, 40)}
    ours, _ = bench.patch(capturer=capturer, verify="first")
    bench.sample(ours, **job)
    assert "parity" not in bench.report.fallbacks
    assert bench.report.path.value == "graph"


def test_the_second_conditioning_is_compared_with_what_the_model_kept(bench, capturer):
    """Positive with a reference, negative without: two kinds, each compared with its own cache."""
    from workbench import prompt

    job = {"positive": prompt(2, references=1), "negative": prompt(3, tokens=4), "cfg": 3.0}
    ours, _ = bench.patch(capturer=capturer)
    assert torch.equal(bench.sample(ours, **job), bench.sample(**job))
    assert bench.report.verified == {"body": True, "replay": True}


def test_models_in_use_stay_loaded(bench, monkeypatch):
    from comfy import model_management
    from workbench import Workbench

    from graph_cache.models.comfyui import core

    used, idle = Workbench(bench.kind), Workbench(bench.kind)
    for other in (bench, used, idle):
        other.sample(steps=2)
    for loaded in model_management.current_loaded_models:
        loaded.currently_used = loaded.model.model is used.patcher.model
    asked = []
    with monkeypatch.context() as patched:
        patched.setattr(model_management, "free_memory", lambda *given: asked.append(given))
        core.free_others(2**30, torch.device("cpu"), (bench.patcher,))
    ((nbytes, _, keep),) = asked
    kept = {id(loaded.model.model) for loaded in keep}
    assert nbytes == 2**30
    assert kept == {id(bench.patcher.model), id(used.patcher.model)}
    model_management.unload_all_models()


def test_room_is_left_for_weights_that_come_later(bench, capturer, monkeypatch):
    """DynamicVRAM brings weights as they are used: free memory before that is not ours."""
    from types import SimpleNamespace

    from graph_cache import entries
    from graph_cache.models.comfyui import core
    from graph_cache.models.comfyui.adapter import ComfyUIAdapter
    from graph_cache.models.comfyui.run_context import RunContext

    monkeypatch.setattr(entries, "available_bytes", lambda device, graphs: 2**30)
    monkeypatch.setattr(core, "headroom_bytes", lambda: 2**20)
    monkeypatch.setattr(core, "free_others", lambda *asked: None)
    dynamic = SimpleNamespace(is_dynamic=lambda: True, model_size=lambda: 2**31 + 5)
    dynamic.loaded_size = lambda: 5
    adapter = ComfyUIAdapter(bench.model)
    adapter.begin_run(RunContext(dynamic, {}, 5, 3))
    assert adapter.pending_bytes() == 2**31
    ours, runtime = bench.patch(capturer=capturer)
    bench.sample(ours)
    assert bench.report.path.value == "graph"
    runtime._cache._dispatcher.store.pending_bytes = adapter.pending_bytes
    bench.sample(ours)
    assert "2,049 MiB of headroom" in bench.report.fallbacks["vram"].sentence
    assert {step.reason for step in bench.report.steps} == {"vram"}


def test_an_error_in_our_path_leaves_nothing_of_comfyuis_half_way(bench, capturer, monkeypatch):
    from graph_cache.models.comfyui import core, step

    cleaned = []
    monkeypatch.setattr(core, "clean_up_after_error", lambda: cleaned.append(1))

    def fail(*args, **kwargs):
        raise RuntimeError("a kernel of another version")

    monkeypatch.setattr(step, "decode", fail)
    ours, _ = bench.patch(capturer=capturer)
    assert torch.equal(bench.sample(ours), bench.sample())
    assert cleaned == [1]
    assert {step.reason for step in bench.report.steps[1:]} == {"step_failed"}


# --- lifetime ----------------------------------------------------------------------------------


def test_a_clone_that_dies_in_the_middle(bench, capturer):
    """ComfyUI tells all of a clone's listeners that it goes; the run does not care."""
    ours, _ = bench.patch(capturer=capturer)

    def clone_and_drop(*given):
        ours.clone().detach(unpatch_all=False)
        gc.collect()

    run, _ = before_calls(ours, {4: clone_and_drop})
    assert torch.equal(bench.sample(run, steps=7), bench.sample(steps=7))
    assert bench.report.counts["replayed"] == 4


def test_a_run_that_cannot_be_opened_is_reported(bench, monkeypatch):
    ours, runtime = bench.patch()
    monkeypatch.setattr(runtime, "_attach", lambda model: [].pop())
    bench.sample(ours)
    assert bench.report.fallbacks["step_failed"].detail == "pop from empty list"
