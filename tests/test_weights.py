"""Weights, modules and settings that change under a cache."""

import gc
import weakref

import torch
from helpers import (
    TEXT,
    kinds,
    same,
)

from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

STEPS = 6


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
