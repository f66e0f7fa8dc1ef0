"""DynamicVRAM: a graph is only replayed over memory that is what was captured.

The ranges here behave as comfy_aimdo's do, with pages that can be taken away: faulting a range
gives its signature or None, and content is valid as long as the signature is the one under which a
module has loaded it.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import counters_add_up

from graph_cache.models.comfyui import core, residency
from graph_cache.models.comfyui.residency import Residency

pytestmark = pytest.mark.filterwarnings("ignore")


class FakeVbar:
    """Virtual memory whose pages can be evicted."""

    def __init__(self):
        self.generation = {}
        self.pins = {}
        self.full = False
        self.faults = 0

    def alloc(self, name):
        return (self, name, 1)

    def vbar_fault(self, allocation):
        _, name, _ = allocation
        self.faults += 1
        if self.full and name not in self.generation:
            return None
        self.generation.setdefault(name, 1)
        self.pins[name] = self.pins.get(name, 0) + 1
        return bytearray([self.generation[name]])

    def vbar_unpin(self, allocation):
        _, name, _ = allocation
        self.pins[name] -= 1
        assert self.pins[name] >= 0, "unpinned more often than pinned"

    @staticmethod
    def vbar_signature_compare(a, b):
        return a is not None and b is not None and bytes(a) == bytes(b)

    def evict(self, *names):
        for name in names or list(self.generation):
            assert not self.pins.get(name), "a pinned page was evicted"
            self.generation[name] = self.generation.get(name, 0) + 1

    def take_all(self):
        assert not any(self.pins.values())
        self.generation, self.full = {}, True


@pytest.fixture
def managed(bench, monkeypatch):
    """A model whose linear layers lie in ranges, one around each block's."""
    vbar = FakeVbar()
    monkeypatch.setattr(core, "vbar", lambda: vbar)
    for index, block in enumerate(bench.model.transformer_blocks):
        block._v_block = vbar.alloc(f"block {index}")
        for module in block.modules():
            if hasattr(module, "weight") and module.weight is not None:
                module._v = vbar.alloc(f"block {index}")
    bench.model.proj_out._v = vbar.alloc("proj_out")
    bench.model.img_in._v = vbar.alloc("img_in")
    bench.vbar = vbar
    load(bench)
    return bench


def load(bench):
    """What running the modules does: their content is loaded under the current signature."""
    for module in bench.model.modules():
        if getattr(module, "_v", None) is not None:
            module._v_signature = bench.vbar.vbar_fault(module._v)
            if module._v_signature is not None:
                bench.vbar.vbar_unpin(module._v)


@pytest.fixture
def sampled(managed, capturer, monkeypatch):
    """Samples, with something done before some of the model's calls."""

    def sample(events, steps=7):
        vbar, calls = managed.vbar, []
        theirs = managed.sample(steps=steps)
        ours, _ = managed.patch(capturer=capturer)

        def around(executor, *args, **kwargs):
            calls.append(1)
            events.get(len(calls), lambda: None)()
            return executor(*args, **kwargs)

        ours.add_wrapper_with_key("apply_model", "events", around)
        original = residency.Residency.resident
        # An eager step loads what is missing, as the modules themselves do.
        from graph_cache.models.comfyui import step

        decode = step.decode

        def loading(*args, **kwargs):
            load(managed)
            return decode(*args, **kwargs)

        monkeypatch.setattr(step, "decode", loading)
        assert torch.equal(managed.sample(ours, steps=steps), theirs)
        assert not any(vbar.pins.values()), "pages were left pinned"
        assert residency.Residency.resident is original
        return [
            step.kind.value + (f" {step.reason}" if step.reason else "")
            for step in managed.report.steps
        ]

    return sample


def test_replayed_while_nothing_is_taken_away(sampled, managed):
    assert sampled({}) == ["prefill", "eager warm_up", "captured", *["replayed"] * 4]
    assert counters_add_up(managed.report, 7)


def test_a_page_taken_away_is_not_replayed_over(sampled, managed, capturer):
    evict = {5: lambda: managed.vbar.evict("block 1")}
    assert sampled(evict) == [
        "prefill",
        "eager warm_up",
        "captured",
        "replayed",
        # The page is there again, but its content is not.
        "eager weights_streamed",
        "eager warm_up",
        "captured",
    ]
    assert capturer.steps[0].released


def test_memory_that_is_gone_for_good_leaves_the_run_eager(sampled, managed, capturer):
    assert sampled({5: managed.vbar.take_all}) == [
        "prefill",
        "eager warm_up",
        "captured",
        "replayed",
        *["eager weights_streamed"] * 3,
    ]
    assert all(step.released for step in capturer.steps)
    assert "of 5 parts on the device" in managed.report.fallbacks["weights_streamed"].sentence


def test_a_page_taken_away_between_warm_up_and_capture(sampled, managed, capturer):
    """A capture would copy the weights from the host, which ends in an error at best."""
    assert sampled({3: lambda: managed.vbar.evict("proj_out")}) == [
        "prefill",
        "eager warm_up",
        "eager weights_streamed",
        "eager warm_up",
        "captured",
        *["replayed"] * 2,
    ]
    assert not any(step.released for step in capturer.steps[:-1])


def test_weights_in_ranges_are_not_looked_for_elsewhere(managed):
    watched = Residency(managed.model)
    watched.refresh()
    names = {id(tensor) for tensor in watched.tensors()}
    assert id(managed.model.proj_out.weight) not in names
    assert id(managed.model.txt_in) not in names
    assert any(names)


def test_the_fingerprint_follows_ranges_addresses_and_modules(managed):
    watched = Residency(managed.model)

    def fingerprint():
        watched.refresh()
        with watched.resident() as away:
            assert away is None
            return watched.fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    managed.vbar.evict("img_in")
    load(managed)
    second = fingerprint()
    assert second != first
    parameter = next(iter(watched.tensors()))
    parameter.data = parameter.data.clone()
    assert fingerprint() != second


def test_a_check_costs_one_fault_a_range(managed):
    """Once the content is known to be there; 40 ranges take less than half a millisecond."""
    watched = Residency(managed.model)
    watched.refresh()
    with watched.resident():
        pass
    managed.vbar.faults = 0
    with watched.resident() as away:
        assert away is None
    assert managed.vbar.faults == len(managed.model.transformer_blocks) + 2


def test_addresses_of_a_quantised_tensor_are_those_of_its_parts():
    data, scale = torch.zeros(4, dtype=torch.int8), torch.ones(1)
    quantised = SimpleNamespace(
        data=data, scale=scale, __tensor_flatten__=lambda: (["data", "scale"], None)
    )
    assert residency.addresses_of(quantised) == (data.data_ptr(), scale.data_ptr())
    assert residency.addresses_of(torch.nn.Parameter(scale)) == (scale.data_ptr(),)
