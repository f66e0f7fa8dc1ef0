"""Runs one after the other: what is kept, what is given back, and that no picture is spoilt."""

import comfy_env
import pytest
import torch
from helpers import FakeCapturer, counters_add_up

pytestmark = pytest.mark.filterwarnings("ignore")


def lora(bench, strength=1.0):
    """The model with a LoRA on one weight, as the loader nodes put it there."""
    name = "transformer_blocks.1.attn.to_v.weight"
    generator = torch.Generator().manual_seed(9)
    delta = 0.3 * torch.randn(bench.model.get_parameter(name).shape, generator=generator)
    patcher = bench.patcher.clone()
    patcher.add_patches({f"diffusion_model.{name}": ("diff", (delta,))}, strength)
    return patcher


def cancel_after(calls):
    """A wrapper that cancels a run as ComfyUI's Cancel button does."""
    from comfy import model_management

    count = 0

    def wrapper(executor, *args, **kwargs):
        nonlocal count
        count += 1
        if count == calls:
            model_management.interrupt_current_processing()
        return executor(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("keep", [False, True], ids=["released", "kept"])
@pytest.mark.parametrize("mode", ["buffers", "auto"])
def test_ten_runs_that_alternate(bench, mode, keep, capturer):
    """Prompts, LoRA on and off, sizes, references, guidance, and a cancel in the middle."""
    from comfy import model_management
    from workbench import prompt

    jobs = [
        {"positive": prompt(1)},
        {"positive": prompt(3)},
        {"positive": prompt(1), "size": (4, 6)},
        {"positive": prompt(1), "lora": True},
        {"positive": prompt(1), "cancel": True},
        {"positive": prompt(1)},
        {"positive": prompt(2, references=2), "cfg": 2.5},
        {"positive": prompt(2, references=2), "lora": True, "cfg": 2.5},
        {"positive": prompt(5, tokens=4), "size": (8, 2), "seed": 7},
        {"positive": prompt(1), "seed": 7},
    ]
    with_lora = lora(bench)
    plain, runtime = bench.patch(mode=mode, keep_between_runs=keep, capturer=capturer)
    # One node's cache before a LoRA loader, so that both models share it.
    loaded = plain.clone()
    loaded.add_patches(
        {key: next(patch[1] for patch in value) for key, value in with_lora.patches.items()}
    )
    pictures = []
    for job in jobs:
        job = dict(job)
        ours, theirs = (loaded, with_lora) if job.pop("lora", False) else (plain, bench.patcher)
        if job.pop("cancel", False):
            cancelled = ours.clone()
            cancelled.add_wrapper_with_key("apply_model", "cancel", cancel_after(4))
            with pytest.raises(model_management.InterruptProcessingException):
                bench.sample(cancelled, **job)
            assert "Interrupt" in bench.report.error
            continue
        expected = bench.sample(theirs, **job)
        assert torch.equal(bench.sample(ours, **job), expected)
        assert bench.report.path.value == ("graph" if mode == "auto" else "buffers")
        pictures.append(expected)
    # The jobs do differ, or equality would say nothing.
    assert not torch.equal(pictures[0], pictures[1])
    assert not torch.equal(pictures[0], pictures[3])
    assert (runtime._cache.nbytes > 0) == keep


def test_a_second_run_captures_nothing_if_it_may_keep(bench, capturer):
    from workbench import prompt

    ours, _ = bench.patch(keep_between_runs=True, capturer=capturer, verify="first")
    bench.sample(ours, positive=prompt(1))
    assert bench.report.captures == 1
    theirs = bench.sample(positive=prompt(7))
    # Another clone of the model has been loaded in between.
    assert torch.equal(bench.sample(ours, positive=prompt(7)), theirs)
    assert bench.report.captures == 0
    assert bench.report.counts == {"prefill": 1, "captured": 0, "replayed": 4, "eager": 0}


def test_a_run_gives_everything_back(bench, capturer):
    ours, runtime = bench.patch(capturer=capturer)
    bench.sample(ours)
    assert bench.report.peak_bytes > 0
    assert bench.report.buffer_bytes == bench.report.graph_bytes == 0
    assert runtime._cache.nbytes == 0
    assert all(step.released for step in capturer.steps)


def test_small_weights_made_anew_between_runs_are_not_replayed(bench, capturer):
    """What ComfyUI does at every load with DynamicVRAM."""
    ours, _ = bench.patch(keep_between_runs=True, capturer=capturer)
    theirs = bench.sample()
    bench.sample(ours)
    parameter = next(p for p in bench.model.parameters() if p.ndim == 1 or p.numel() < 8192)
    parameter.data = parameter.data.clone()
    assert torch.equal(bench.sample(ours), theirs)
    assert bench.report.captures == 1
    assert "weights_changed" in bench.report.eager_reasons


@pytest.mark.parametrize("how", ["unload", "detach"])
def test_unloading_the_model_gives_everything_back(bench, capturer, how):
    from comfy import model_management

    ours, runtime = bench.patch(keep_between_runs=True, capturer=capturer)
    theirs = bench.sample()
    bench.sample(ours)
    assert runtime._cache.nbytes > 0
    if how == "unload":
        # What "Free model and node cache" does.
        model_management.unload_all_models()
    else:
        ours.detach()
    assert runtime._cache.nbytes == 0
    assert torch.equal(bench.sample(ours), theirs)


def test_the_model_unloaded_in_the_middle_of_a_run(bench, capturer):
    ours, runtime = bench.patch(capturer=capturer)
    calls = 0

    def unload(executor, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == 4:
            runtime.on_detach(ours, False)
        return executor(*args, **kwargs)

    theirs = bench.sample()
    ours.add_wrapper_with_key("apply_model", "unload", unload)
    assert torch.equal(bench.sample(ours), theirs)
    assert bench.report.eager_reasons["unregistered"] == 2
    assert counters_add_up(bench.report, 5)


def test_two_models_take_turns(kind, capturer):
    from workbench import Workbench

    one, two = Workbench(kind), Workbench(kind)
    with torch.no_grad():
        two.model.img_in.weight.mul_(2)
    ours, other = one.patch(capturer=capturer)[0], two.patch(capturer=capturer)[0]
    expected = one.sample(), two.sample()
    assert not torch.equal(*expected)
    for _ in range(2):
        assert torch.equal(one.sample(ours), expected[0])
        assert torch.equal(two.sample(other), expected[1])


def test_a_patched_model_patched_again_has_one_cache(bench, capturer):
    first, _ = bench.patch()
    again, _ = bench.patch(first, capturer=capturer, mode="buffers")
    theirs = bench.sample()
    assert torch.equal(bench.sample(again), theirs)
    assert len(bench.reports) == 1
    assert bench.report.mode == "buffers"
    assert len(again.get_wrappers("outer_sample", "qwen_image_graph_cache")) == 1


def test_the_input_model_is_not_changed(bench):
    before = bench.patcher.model_options, bench.patcher.wrappers, bench.patcher.callbacks
    copies = [dict(part) for part in before]
    bench.patch()
    assert [dict(part) for part in before] == copies
    bench.sample()
    assert not bench.reports


def test_an_error_in_the_run_is_reported_and_raised(bench):
    ours, runtime = bench.patch()

    def fail(executor, *args, **kwargs):
        raise ZeroDivisionError("somebody else's error")

    ours.add_wrapper_with_key("calc_cond_batch", "fail", fail)
    with pytest.raises(ZeroDivisionError):
        bench.sample(ours)
    assert bench.report.error == "ZeroDivisionError: somebody else's error"
    assert bench.report.calls == 0
    assert runtime._cache.nbytes == 0


def test_an_error_of_our_own_does_not_end_the_run(bench, monkeypatch, caplog):
    theirs = bench.sample()
    ours, runtime = bench.patch()
    monkeypatch.setattr(runtime, "_attach", lambda model: [].pop())
    assert torch.equal(bench.sample(ours), theirs)
    assert "the model is left alone" in caplog.text


def test_a_report_that_cannot_be_published_does_not_end_the_run(bench, caplog):
    theirs = bench.sample()
    ours, runtime = bench.patch()
    runtime._publish = lambda report: {}["no browser"]
    assert torch.equal(bench.sample(ours), theirs)
    assert "could not be reported" in caplog.text


def test_a_cancelled_run_keeps_nothing(bench):
    from comfy import model_management

    ours, runtime = bench.patch()
    cancelled = ours.clone()
    cancelled.add_wrapper_with_key("apply_model", "cancel", cancel_after(3))
    with pytest.raises(model_management.InterruptProcessingException):
        bench.sample(cancelled)
    assert runtime._cache.nbytes == 0
    assert not bench.model.prefix_cache
    assert torch.equal(bench.sample(ours), bench.sample())


def test_the_models_own_copy_of_the_prefix_is_given_up(bench):
    """One prefix is held, not two."""
    seen = []

    def look(executor, *args, **kwargs):
        out = executor(*args, **kwargs)
        seen.append(bool(bench.model.prefix_cache))
        return out

    options = {"verify": "never", "keep_between_runs": True}
    for mode in ("buffers", "auto"):
        ours, _ = bench.patch(mode=mode, capturer=FakeCapturer(), **options)
        ours.add_wrapper_with_key("apply_model", "look", look)
        for _ in range(2):
            seen.clear()
            bench.sample(ours)
            assert seen == [True, False, False, False, False]
    assert bench.report.counts["replayed"] == 4


def test_a_sampler_inside_a_sampler(kind, capturer):
    """Two models, one sampled within the other's run, as detailers do it."""
    from workbench import Workbench

    bench, other = Workbench(kind), Workbench(kind)
    inner, _ = other.patch(capturer=capturer)
    outer, _ = bench.patch(capturer=FakeCapturer())
    found = []

    def sample_too(executor, *args, **kwargs):
        found.append(other.sample(inner, steps=4))
        return executor(*args, **kwargs)

    outer.add_wrapper_with_key("sampler_sample", "nested", sample_too)
    theirs = bench.sample(), bench.sample(steps=4)
    assert torch.equal(bench.sample(outer), theirs[0])
    assert torch.equal(found[0], theirs[1])
    assert counters_add_up(bench.report, 5)
    assert counters_add_up(other.report, 4)


def test_every_step_is_told_while_it_happens(bench, capturer):
    from graph_cache.models.comfyui import Options, patch

    told, seen = [], []
    ours, runtime = patch(bench.patcher, Options(), bench.reports.append, told.append)
    runtime.capturer = capturer

    def look(executor, *args, **kwargs):
        seen.append(len(told))
        return executor(*args, **kwargs)

    ours.add_wrapper_with_key("apply_model", "look", look)
    bench.sample(ours, steps=6)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert [(live.step, live.steps) for live in told] == [(step, 6) for step in range(1, 7)]
    kinds = ["prefill", "eager", "captured", "replayed", "replayed", "replayed"]
    assert [live.kind for live in told] == kinds
    assert {live.path for live in told} == {"buffers", "graph"}
    assert all(live.step_ms > 0 for live in told)


def test_a_listener_that_fails_is_not_asked_again(bench, caplog):
    from graph_cache.models.comfyui import Options, patch

    asked = []

    def fail(live):
        asked.append(live)
        raise RuntimeError("no browser")

    ours, _ = patch(bench.patcher, Options(), bench.reports.append, fail)
    assert torch.equal(bench.sample(ours), bench.sample())
    assert len(asked) == 1
    assert "could not be reported" in caplog.text


def test_time_saved_is_told_once_a_run_without_us_was_seen(bench, capturer):
    ours, _ = bench.patch(capturer=capturer)
    bench.sample(ours, steps=8)
    assert bench.report.step_ms > 0
    assert bench.report.planned_steps == 8
    assert bench.report.native_step_ms is bench.report.seconds_saved is None
    off, _ = bench.patch(mode="off")
    bench.sample(off, steps=8)
    assert bench.report.native_step_ms == bench.report.step_ms
    assert bench.report.seconds_saved is None
    native = bench.report.step_ms
    bench.sample(ours, steps=8)
    assert bench.report.native_step_ms == native
    assert bench.report.seconds_saved == 7 * (native - bench.report.step_ms) / 1e3
    bench.sample(ours, steps=8, size=(2, 2))
    assert bench.report.native_step_ms is None
    assert bench.report.weights == "float32, resident"


def test_the_model_is_not_kept_alive():
    import gc
    import weakref

    comfy_env.load()
    from comfy import model_management
    from workbench import Workbench

    bench = Workbench("standin")
    ours, runtime = bench.patch()
    bench.sample(ours)
    model_management.unload_all_models()
    alive = weakref.ref(bench.model)
    del bench, ours, runtime
    model_management.cleanup_models_gc()
    gc.collect()
    assert alive() is None
