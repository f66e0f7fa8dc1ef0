"""Real CUDA graphs: bitwise equal to diffusers' cached step, whatever happens around them."""

import gc
import threading

import numpy as np
import pytest
import torch
from helpers import SHORTER_TEXT, TEXT, counters_add_up, references, same

from graph_cache import GraphCache
from graph_cache.eligibility import call_fallback
from graph_cache.layout import SequenceLayout
from graph_cache.memory import is_async_allocator
from graph_cache.models import diffusers_step
from graph_cache.models.diffusers_checks import _TESTED_BACKENDS
from graph_cache.tiny import tiny_pipeline, tiny_transformer
from graph_cache.workload import Workload

pytestmark = pytest.mark.gpu

STEPS = 7
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)
WIDE = SequenceLayout((2, 9), ((1, 32, 64),), (1, 32, 32))
HIGH = SequenceLayout((2, 9), ((1, 64, 32),), (1, 32, 32))


def gpu_model(dtype=torch.bfloat16, **sizes):
    return tiny_transformer(dtype=dtype, device="cuda", **{"layers": 4, "heads": 4, **sizes})


@pytest.fixture
def model():
    return gpu_model()


def counts(cache):
    return cache.report().counts


CASES = {
    "text": ([TEXT], 1),
    "text, batch 3": ([TEXT], 3),
    "cfg": ([TEXT, SHORTER_TEXT], 1),
    "cfg, equal lengths, batch 2": ([TEXT, TEXT], 2),
    "1 reference": ([WIDE], 1),
    "10 references": ([references(10)], 1),
    "3 references, cfg, batch 2": ([references(3), references(3, text=2)], 2),
}


@DTYPES
@pytest.mark.parametrize("arrangement", ["per_layer", "shared"])
@pytest.mark.parametrize("case", CASES)
def test_replay_equals_diffusers_over_whole_runs(case, arrangement, dtype, attach):
    layouts, batch = CASES[case]
    work = Workload(gpu_model(dtype), layouts, batch=batch)
    expected = work.run(STEPS).outputs
    cache = attach(work.model, arrangement=arrangement)
    n = len(layouts)
    assert same(work.run(STEPS).outputs, expected)
    assert counts(cache) == {
        "prefill": n,
        "captured": n,
        "replayed": n * (STEPS - 3),
        "eager": n,
    }
    assert cache.report().verified == {"body": True, "replay": True}
    assert same(work.run(STEPS).outputs, expected)
    assert counts(cache)["replayed"] == n * (STEPS - 1)
    assert counters_add_up(cache.report(), STEPS, n)
    assert all(step.gpu_ms > 0 for step in cache.report().steps)


@pytest.fixture
def set_backend(model):
    """diffusers sets the backend for the whole process, too."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active = _AttentionBackendRegistry.get_active_backend()[0]
    yield model.set_attention_backend
    _AttentionBackendRegistry.set_active_backend(active)


@pytest.mark.parametrize("backend", _TESTED_BACKENDS)
def test_every_allowed_attention_backend(backend, model, set_backend, attach):
    set_backend(backend)
    work = Workload(model, [WIDE])
    expected = work.run(STEPS).outputs
    cache = attach(model)
    for _ in range(2):
        assert same(work.run(STEPS).outputs, expected)
    assert counts(cache)["replayed"] == STEPS - 1
    assert cache.report().attention == backend


def test_a_b_a_with_equal_layouts(model, attach):
    works = [Workload(model, [TEXT], seed=seed) for seed in range(2)]
    expected = [work.run(STEPS).outputs for work in works]
    cache = attach(model)
    for index in (0, 1, 0):
        assert same(works[index].run(STEPS).outputs, expected[index])
    assert cache.report().captures == 0
    assert counts(cache)["replayed"] == STEPS - 1


def test_equal_token_counts_with_other_layouts(model, attach):
    works = [Workload(model, [layout]) for layout in (WIDE, HIGH)]
    expected = [work.run(STEPS).outputs for work in works]
    attach(model)
    for index in (0, 1, 0, 1):
        assert same(works[index].run(STEPS).outputs, expected[index])


def test_a_small_run_after_a_large_one(model, attach):
    works = [Workload(model, [layout]) for layout in (TEXT, WIDE, TEXT)]
    expected = [work.run(STEPS).outputs for work in works]
    attach(model)
    for work, theirs in zip(works, expected):
        assert same(work.run(STEPS).outputs, theirs)


def test_a_new_schedule_with_the_same_graph(model, attach):
    work = Workload(model, [TEXT])
    expected = {steps: work.run(steps).outputs for steps in (5, 9)}
    cache = attach(model)
    for steps in (5, 9, 5):
        assert same(work.run(steps).outputs, expected[steps])
    assert cache.report().captures == 0


def test_freed_memory_full_of_junk(model, attach):
    """A captured kernel that reads freed memory reads NaN here."""
    work = Workload(model, [WIDE])
    expected = work.run(STEPS).outputs
    attach(model)
    plain = work.arguments

    def with_junk(*args):
        gc.collect()
        torch.cuda.empty_cache()
        sizes = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
        junk = [torch.full((size,), float("nan"), device="cuda") for size in sizes for _ in "abcd"]
        del junk
        return plain(*args)

    work.arguments = with_junk
    for _ in range(2):
        assert same(work.run(STEPS).outputs, expected)


def test_inference_mode_and_no_grad_in_turns(model, attach):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    attach(model)
    with torch.inference_mode():
        assert same(work.run(STEPS).outputs, expected)
    assert same(work.run(STEPS).outputs, expected)
    with torch.inference_mode():
        assert same(work.run(STEPS).outputs, expected)


def test_callers_on_several_streams(model, attach):
    works = [Workload(model, [TEXT], seed=seed) for seed in range(2)]
    expected = [work.run(STEPS).outputs for work in works]
    attach(model)
    streams = [torch.cuda.Stream() for _ in works]
    torch.cuda.synchronize()
    caches = [work.kv_caches()[0] for work in works]
    latents = [work.latents.clone() for work in works]
    torch.cuda.synchronize()
    for step in range(STEPS):
        for index, work in enumerate(works):
            with torch.cuda.stream(streams[index]):
                arguments = work.arguments(0, latents[index], 1 - step / STEPS)
                mode = "cached" if step else "extract"
                output = work.model(**arguments, kv_cache=caches[index], kv_cache_mode=mode)[0]
                output = output[:, -work.latents.shape[1] :]
                latents[index] = latents[index] - output / STEPS
                streams[index].synchronize()
                assert same([output], [expected[index][step]])


def test_other_threads_use_cuda_during_a_capture(model, attach):
    work = Workload(model, [WIDE])
    expected = work.run(STEPS).outputs
    stop, errors = threading.Event(), []

    def busy():
        while not stop.is_set():
            try:
                torch.cuda.mem_get_info()
                torch.ones(1 << 16, device="cuda").sum().item()
            except RuntimeError as error:
                errors.append(error)
                return

    cache = attach(model)
    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(3):
            assert same(work.run(STEPS).outputs, expected)
            assert counts(cache)["captured"] + counts(cache)["replayed"] >= STEPS - 2
            cache.release_graphs()
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_weights_that_move_and_come_back(model, attach):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model)
    work.run(STEPS)
    model.to("cpu")
    torch.cuda.empty_cache()
    spare = torch.full((1 << 24,), float("nan"), device="cuda")
    model.to("cuda")
    assert same(work.run(STEPS).outputs, expected)
    del spare
    assert counters_add_up(cache.report(), STEPS)


def test_a_weight_replaced_in_the_middle_of_a_run(model, attach):
    work = Workload(model, [TEXT])
    cache = attach(model)
    plain, calls = work.arguments, iter(range(100))

    def replacing(*args):
        if next(calls) % STEPS == 4:
            linear = model.transformer_blocks[0].attn.to_q
            linear.weight = torch.nn.Parameter(linear.weight * 1.01, requires_grad=False)
        return plain(*args)

    kept = model.transformer_blocks[0].attn.to_q.weight
    work.arguments = replacing
    ours = work.run(STEPS).outputs
    assert cache.report().eager_reasons == {"warm_up": 1, "weights_changed": 1}
    model.transformer_blocks[0].attn.to_q.weight = kept
    cache.mode = "off"
    assert same(ours, work.run(STEPS).outputs)


def test_weights_on_another_device_step_down(model, attach):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model)
    model.register_buffer("elsewhere", torch.ones(1))
    assert same(work.run(STEPS).outputs, expected)
    assert "device_mismatch" in cache.report().fallbacks


# --- what can fail ----------------------------------------------------------------------------


def out_of_memory():
    """What torch raises itself for a size that no device has."""
    return torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


FAILURES = [
    ("allocation", "vram"),
    ("prefill", "vram"),
    ("warm-up", "vram"),
    ("replay", "vram_graph"),
]
if not (torch.cuda.is_available() and is_async_allocator()):
    # There a capture that fails is the process's last: test_processes.py has it.
    FAILURES.append(("capture", "vram_graph"))


@pytest.mark.parametrize(("fails_at", "code"), FAILURES)
def test_out_of_memory(fails_at, code, model, attach, monkeypatch):
    work = Workload(model, [WIDE])
    expected = work.run(STEPS).outputs
    cache = attach(model, verify="never")
    real = diffusers_step.decode
    calls = iter(range(100))
    with monkeypatch.context() as patch:
        if fails_at == "allocation":
            patch.setattr("graph_cache.entries.PrefixBuffers", lambda *args: out_of_memory())
        elif fails_at == "prefill":
            patch.setattr(diffusers_step, "target_rope", lambda *args: out_of_memory())
        elif fails_at == "replay":
            patch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: out_of_memory())
        else:
            at = 0 if fails_at == "warm-up" else 1

            def decode(*args):
                if next(calls) == at:
                    out_of_memory()
                return real(*args)

            patch.setattr(diffusers_step, "decode", decode)
        assert same(work.run(STEPS).outputs, expected)
    assert code in cache.report().fallbacks
    assert counters_add_up(cache.report(), STEPS)
    cache.clear()
    assert same(work.run(STEPS).outputs, expected)
    assert counts(cache)["captured"] == 1


def test_a_step_that_synchronises_is_not_captured(model, attach, monkeypatch):
    """A hidden .item() is the classic; inside a capture it can end the process."""
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model)
    real = diffusers_step.decode

    def synchronising(*args):
        output = real(*args)
        output.sum().item()
        return output

    with monkeypatch.context() as patch:
        patch.setattr(diffusers_step, "decode", synchronising)
        assert same(work.run(STEPS).outputs, expected)
    report = cache.report()
    assert report.eager_reasons == {"warm_up": 1, "host_sync": STEPS - 2}
    assert "test_graphs.py" in report.fallbacks["host_sync"].sentence
    cache.clear()
    assert same(work.run(STEPS).outputs, expected)
    assert counts(cache)["captured"] == 1


def test_inside_somebody_elses_capture():
    """Asked without a call of the model: that would fail the capture, as it synchronises."""
    value = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1
        inside = call_fallback(value.device)
    assert inside.code == "nested_capture"
    assert call_fallback(value.device) is None


def test_graphs_share_their_memory(attach):
    """Eight layouts hold little more than the largest of them."""
    model = gpu_model(layers=4, heads=16)
    works = [
        Workload(model, [SequenceLayout((length,), (), (1, 64, 64))]) for length in range(20, 28)
    ]
    cache = attach(model)
    works[0].run(STEPS)
    one = cache.report().graph_bytes
    for work in works[1:]:
        work.run(STEPS)
    assert cache.report().entries == 8
    assert cache.report().graph_bytes < 1.5 * one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_pipeline(dtype, attach):
    pipe = tiny_pipeline(dtype=dtype, device="cuda", layers=4)

    def generate(prompt, **options):
        image = pipe(
            prompt,
            negative_prompt="grey",
            true_cfg_scale=2.0,
            height=96,
            width=64,
            num_inference_steps=STEPS,
            generator=torch.Generator("cuda").manual_seed(1),
            **options,
        ).images[0]
        return np.asarray(image)

    prompts = ("a red circle", "a blue square", "a red circle")
    expected = [generate(prompt) for prompt in prompts]
    cache = attach(pipe.transformer)
    assert all(np.array_equal(generate(p), image) for p, image in zip(prompts, expected))
    assert counts(cache)["replayed"] == 2 * (STEPS - 1)
    freed = generate(prompts[0], callback_on_step_end=cache.free_after_last_step)
    assert np.array_equal(freed, expected[0])
    assert cache.nbytes == 0


def test_verification_is_off_after_the_first_capture_of_a_kind(model, attach):
    cache = attach(model, verify="first", arrangement="shared")
    Workload(model, [TEXT]).run(STEPS)
    assert cache.report().verified == {"body": True, "replay": True}
    Workload(model, [SHORTER_TEXT]).run(STEPS)
    assert cache.report().verified == {}
    assert counts(cache)["captured"] == 1


def test_detach_gives_everything_back(model):
    cache = GraphCache.attach(model, headroom_bytes=0)
    Workload(model, [TEXT]).run(STEPS)
    cache.detach()
    assert cache.nbytes == 0
    assert cache.report().calls == STEPS
    Workload(model, [TEXT]).run(STEPS)
    assert cache.report().calls == STEPS, "a detached cache sees no call"
