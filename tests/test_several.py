"""Several runs and pipelines at once, and what a run leaves behind."""

import pytest
import torch
from helpers import (
    SHORTER_TEXT,
    TEXT,
    counters_add_up,
    same,
    step_of,
)

from graph_cache.workload import Workload

STEPS = 6


class _Pipe:
    num_timesteps = STEPS


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
        output = step_of(works[index], caches[index], latents[index], step, STEPS)
        assert same([output], [expected[index][step]])
        latents[index] = latents[index] - output / STEPS
        if index == 0:
            cache.free_after_last_step(_Pipe, step, None, {})
    assert cache.nbytes == 0
    output = step_of(works[1], caches[1], latents[1], STEPS - 1, STEPS)
    assert same([output], [expected[1][-1]])
    for layer in caches[1].layer_caches:
        assert layer.k.untyped_storage().nbytes() == layer.k.nbytes


def test_every_prefill_looks_the_model_over(model, attach, capturer):
    """A run cancelled after its prefill, its traceback kept: the next must not be taken for it."""
    work = Workload(model, [TEXT])
    cache = attach(model, capturer=capturer)
    kept = work.kv_caches()[0]
    step_of(work, kept, work.latents, 0, STEPS)
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
    step_of(work, kv_cache, work.latents, 0, STEPS)
    mask, embeds = work.masks[0], work.prompts[0]
    work.masks[0] = torch.cat([torch.zeros(1, 2, dtype=torch.bool), mask], dim=1)
    work.prompts[0] = torch.cat([embeds[:, :2], embeds], dim=1)
    ours = step_of(work, kv_cache, work.latents, 1, STEPS)
    assert cache.report().eager_reasons == {"layout_changed": 1}
    cache.mode = "off"
    assert same([ours], [step_of(work, kv_cache, work.latents, 1, STEPS)])


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
