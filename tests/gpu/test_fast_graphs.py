"""The fast profile on a GPU: its kernels, its graphs, and how near they stay."""

import kernel_cases
import pytest
import torch
from helpers import SHORTER_TEXT, TEXT, bitwise_equal, counters_add_up, references, same, step_of

from graph_cache.fast import TorchOps
from graph_cache.fast.triton_ops import TritonOps
from graph_cache.layout import SequenceLayout
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

pytestmark = pytest.mark.gpu

STEPS = 7
NEAR = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of the largest relative difference in a run. TF32 is off, but products are other kernels."""
DTYPES = pytest.mark.parametrize("dtype", NEAR, ids=str)
BIG = SequenceLayout((2, 9), ((1, 32, 32),), (1, 32, 32))
CASES = {
    "text": ([TEXT], 1),
    "cfg, batch 2": ([TEXT, SHORTER_TEXT], 2),
    "1 reference": ([BIG], 1),
    "3 references, cfg": ([references(3), references(3, text=2)], 1),
}


@DTYPES
@pytest.mark.parametrize("size", kernel_cases.SHAPES)
@pytest.mark.parametrize("ops", [TritonOps(), TorchOps()], ids=lambda ops: ops.name)
def test_kernels(ops, dtype, size):
    bound = kernel_cases.BOUND[dtype]
    kernel_cases.check(ops, dtype, kernel_cases.SHAPES[size], "cuda", bound)


def test_kernels_keep_to_float16():
    kernel_cases.check_float16_range(TritonOps(), "cuda")


@DTYPES
@pytest.mark.parametrize("arrangement", ["per_layer", "shared"])
@pytest.mark.parametrize("case", CASES)
def test_replay_is_near_to_diffusers_and_equals_the_eager_step(case, arrangement, dtype, attach):
    layouts, batch = CASES[case]
    model = tiny_transformer(dtype=dtype, device="cuda", layers=4, heads=4)
    work = Workload(model, layouts, batch=batch)
    expected = work.run(STEPS).outputs
    cache = attach(model, arrangement=arrangement, profile="fast")
    first = work.run(STEPS).outputs
    report = cache.report()
    assert report.kernels["elementwise"] == "triton"
    assert report.counts["captured"] == len(layouts)
    assert report.counts["replayed"] == len(layouts) * (STEPS - 3)
    assert report.verified == {"replay": True}
    assert counters_add_up(report, STEPS, len(layouts))
    for found, wanted in zip(first, expected):
        away = (found.float() - wanted.float()).norm() / wanted.float().norm()
        assert away < NEAR[dtype]
    # From here on replays alone; and the same steps without graphs.
    assert same(work.run(STEPS).outputs, first)
    cache.mode = "buffers"
    assert same(work.run(STEPS).outputs, first)
    cache.profile, cache.mode = "exact", "auto"
    assert same(work.run(STEPS).outputs, expected)


def test_a_weight_replaced_between_steps_is_used(attach):
    model = tiny_transformer(dtype=torch.bfloat16, device="cuda", layers=4, heads=4)
    work = Workload(model, [TEXT])
    cache = attach(model, profile="fast", verify="never")
    (kv_cache,) = work.kv_caches()
    for step in range(5):
        step_of(work, kv_cache, work.latents, step, STEPS)
    layer = model.transformer_blocks[1].attn.to_v
    layer.weight.data = torch.randn_like(layer.weight)
    found = [step_of(work, kv_cache, work.latents, 5, STEPS) for _ in range(3)]
    assert cache.report().counts["captured"] == 2
    assert bitwise_equal(found[1], found[2])
    cache.detach()
    expected = step_of(work, kv_cache, work.latents, 5, STEPS).float()
    assert ((found[2].float() - expected).norm() / expected.norm()).item() < NEAR[torch.bfloat16]


def test_memory_goes_back_to_what_it_was(attach):
    model = tiny_transformer(dtype=torch.bfloat16, device="cuda", layers=4, heads=4)
    work = Workload(model, [BIG])
    work.run(STEPS)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = attach(model, profile="fast")
    for _ in range(3):
        work.run(STEPS)
    cache.detach()
    torch.cuda.synchronize()
    # A parameter of its own size may be rounded up otherwise.
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
