"""The fast profile: near to the model's own step, visibly so, and gone without a trace."""

import gc
import json
import weakref

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
    step_of,
)

from graph_cache import GraphCache, steps
from graph_cache.fast import FastModel, FusedLinear, TorchOps, part
from graph_cache.fast.attention import Attention
from graph_cache.models import diffusers_fast
from graph_cache.settings import numeric_settings
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Workload

STEPS = 5
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = pytest.mark.parametrize("dtype", NEAR, ids=str)
CASES = {
    "text": ([TEXT], 1),
    "cfg, batch 2": ([TEXT, SHORTER_TEXT], 2),
    "1 reference": ([ONE_REFERENCE], 1),
    "3 references, cfg": ([references(3), references(3, text=2)], 1),
}


def away(found, expected):
    """The largest relative difference of two lists of outputs."""
    pairs = zip(found, expected, strict=True)
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)


@DTYPES
@pytest.mark.parametrize("arrangement", ["per_layer", "shared"])
@pytest.mark.parametrize("case", CASES)
def test_near_to_diffusers_cached_step(case, arrangement, dtype, attach, capturer):
    layouts, batch = CASES[case]
    work = Workload(tiny_transformer(dtype=dtype), layouts, batch=batch)
    expected = work.run(STEPS).outputs
    cache = attach(work.model, arrangement=arrangement, capturer=capturer, profile="fast")
    for _ in range(2):
        assert 0 < away(work.run(STEPS).outputs, expected) < NEAR[dtype]
        report = cache.report()
        assert counters_add_up(report, STEPS, len(layouts))
        assert report.profile == "fast"
    assert report.kernels == {
        "elementwise": "torch",
        "attention": "torch's choice",
        "qkv": "one product",
        "gate_up": "one product",
    }


def test_the_difference_is_measured_and_reported(attach, model):
    work = Workload(model, [TEXT])
    cache = attach(model, profile="fast")
    work.run(STEPS)
    report = cache.report()
    assert 0 < report.difference < NEAR[torch.float32]
    assert report.to_dict()["difference"] == report.difference
    assert "body" not in report.verified


def test_a_comparison_of_a_kind_is_made_once(model):
    work = Workload(model, [TEXT])
    with GraphCache.attach(model, profile="fast", headroom_bytes=0) as cache:
        work.run(STEPS)
        assert cache.report().difference is not None
        work.run(STEPS)
        assert cache.report().difference is None


def test_exact_again_after_fast(attach, model, capturer):
    work = Workload(model, [TEXT, SHORTER_TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, profile="fast", capturer=capturer)
    fast = work.run(STEPS).outputs
    cache.profile = "exact"
    assert same(work.run(STEPS).outputs, expected)
    assert (cache.report().profile, cache.report().kernels) == ("exact", {})
    cache.profile = "fast"
    assert same(work.run(STEPS).outputs, fast)


def test_detach_gives_every_weight_its_own_memory(attach, model):
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    identities = [id(weight) for weight in model.parameters()]
    cache = attach(model, profile="fast")
    work.run(STEPS)
    shared = model.transformer_blocks[0].attn
    storages = {layer.weight.untyped_storage().data_ptr() for layer in (shared.to_q, shared.to_k)}
    assert len(storages) == 1
    cache.detach()
    assert [id(weight) for weight in model.parameters()] == identities
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert len(storages) == len(identities)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert same(work.run(STEPS).outputs, expected)


def test_a_state_dict_can_be_saved_in_between(attach, model, tmp_path):
    from safetensors.torch import load_file

    cache = attach(model, profile="fast")
    Workload(model, [TEXT]).run(STEPS)
    model.save_pretrained(tmp_path)
    saved = load_file(next(tmp_path.glob("*.safetensors")))
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert cache.report().profile == "fast"


def test_a_weight_replaced_between_runs_is_used(attach, model, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, profile="fast", capturer=capturer)
    work.run(STEPS)
    model.transformer_blocks[1].attn.to_k.weight.data = torch.randn(256, 256)
    found = work.run(STEPS).outputs
    assert cache.report().kernels["qkv"] == "one product"
    cache.detach()
    assert away(found, work.run(STEPS).outputs) < NEAR[torch.float32]


def test_a_weight_replaced_between_steps_is_used(attach, model, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, profile="fast", capturer=capturer, verify="never")
    (kv_cache,) = work.kv_caches()
    for step in range(4):
        step_of(work, kv_cache, work.latents, step, STEPS)
    model.transformer_blocks[1].attn.to_k.weight.data = torch.randn(256, 256)
    found = [step_of(work, kv_cache, work.latents, step, STEPS) for step in (4, 4, 4)]
    assert kinds(cache)[-3:] == ["eager", "captured", "replayed"]
    cache.detach()
    expected = step_of(work, kv_cache, work.latents, 4, STEPS)
    assert away(found, [expected] * 3) < NEAR[torch.float32]


def test_a_step_that_is_too_far_away_ends_the_profile(attach, model, capturer, monkeypatch):
    work = Workload(model, [TEXT, SHORTER_TEXT])
    expected = work.run(STEPS).outputs
    monkeypatch.setitem(steps._FARTHEST, torch.float32, 0.0)
    cache = attach(model, profile="fast", capturer=capturer)
    assert same(work.run(STEPS).outputs, expected)
    report = cache.report()
    assert report.counts["eager"] == 2 * (STEPS - 1)
    assert report.eager_reasons == {"parity_fast": 2 * (STEPS - 1)}
    assert counters_add_up(report, STEPS, 2)
    # The exact profile is not to blame.
    assert same(work.run(STEPS).outputs, expected)
    report = cache.report()
    assert report.profile == "exact"
    assert report.counts["captured"] == 2
    assert "parity_fast" in report.fallbacks


def test_a_profile_that_there_is_not(model):
    with pytest.raises(ValueError, match="profile must be 'exact' or 'fast', not 'faster'"):
        GraphCache.attach(model, profile="faster")


def test_a_module_replaced_between_runs_is_used(attach, model, capturer):
    work = Workload(model, [TEXT])
    cache = attach(model, profile="fast", verify="never", capturer=capturer)
    work.run(STEPS)
    block = model.transformer_blocks[1]
    block.attn.to_k = torch.nn.Linear(256, 256, bias=False)
    block.attn.to_out[0] = torch.nn.Linear(256, 256, bias=False)
    block.img_mlp.out = torch.nn.Linear(512, 256, bias=False)
    found = work.run(STEPS).outputs
    assert cache.report().kernels["qkv"] == "one product"
    cache.detach()
    assert away(found, work.run(STEPS).outputs) < NEAR[torch.float32]


@pytest.mark.parametrize("where", ["attached", "both", "detached"])
def test_weights_stay_trainable_whatever_the_grad_mode(where, model):
    before = [(weight.requires_grad, weight.is_inference()) for weight in model.parameters()]
    assert before[0] == (False, False)
    model.requires_grad_(True)
    work = Workload(model, [TEXT])
    with torch.inference_mode(where != "detached"), torch.no_grad():
        cache = GraphCache.attach(model, profile="fast", headroom_bytes=0)
        work.run(STEPS)
        assert cache.report().kernels["qkv"] == "one product"
        work.run(STEPS)
        if where == "both":
            cache.detach()
    with torch.inference_mode(where == "detached"):
        cache.detach()
    for weight in model.parameters():
        assert weight.requires_grad and not weight.is_inference()
        assert weight.untyped_storage().nbytes() == weight.nbytes
    with torch.enable_grad():
        (model.transformer_blocks[0].attn.to_q.weight.sum() * 2).backward()


def test_a_model_that_is_moved_leaves_nothing_behind(attach, model):
    work = Workload(model, [TEXT])
    attach(model, profile="fast")
    work.run(STEPS)
    layer = model.transformer_blocks[0].attn.to_q
    old = weakref.ref(layer.weight.untyped_storage())
    model.to(torch.float64).to(torch.float32)
    gc.collect()
    assert old() is None
    work.run(STEPS)
    assert layer.weight.untyped_storage().nbytes() == 3 * layer.weight.nbytes


def test_a_patched_class_is_not_computed_again(attach, model, monkeypatch, capturer):
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21SwiGLUFeedForward

    work = Workload(model, [TEXT])
    cache = attach(model, profile="fast", capturer=capturer)
    work.run(STEPS)
    assert cache.report().profile == "fast"
    real = QwenImage21SwiGLUFeedForward.forward
    monkeypatch.setattr(
        QwenImage21SwiGLUFeedForward, "forward", lambda self, x: 1.1 * real(self, x)
    )
    found = work.run(STEPS).outputs
    assert cache.report().profile == "exact"
    assert "patched forward" in cache.report().fallbacks["profile_exact"].sentence
    cache.detach()
    assert same(found, work.run(STEPS).outputs)


def test_preparing_that_fails_leaves_the_exact_profile(attach, model, monkeypatch, capturer):
    def fail(*_):
        raise RuntimeError("Triton: CalledProcessError: gcc")

    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    monkeypatch.setattr("graph_cache.models.diffusers_fast.choose_ops", fail)
    cache = attach(model, profile="fast", capturer=capturer)
    for _ in range(2):
        assert same(work.run(STEPS).outputs, expected)
        report = cache.report()
        assert (report.profile, report.path.value) == ("exact", "graph")
        assert "gcc" in report.fallbacks["profile_exact"].sentence


def test_a_step_that_fails_is_exact_from_the_next_run_on(attach, model, monkeypatch, capturer):
    def fail(*_):
        raise RuntimeError("Triton: OutOfResources: shared memory")

    work = Workload(model, [TEXT, SHORTER_TEXT])
    expected = work.run(STEPS).outputs
    monkeypatch.setattr("graph_cache.fast.ops.TorchOps.swiglu", fail)
    cache = attach(model, profile="fast", capturer=capturer)
    assert same(work.run(STEPS).outputs, expected)
    report = cache.report()
    assert report.eager_reasons == {"fast_failed": 2 * (STEPS - 1)}
    assert (report.profile, report.kernels) == ("exact", {})
    assert same(work.run(STEPS).outputs, expected)
    assert cache.report().counts["captured"] == 2


def test_a_step_that_is_no_number_ends_the_profile(attach, model, monkeypatch, capturer):
    real = diffusers_fast.step
    monkeypatch.setattr(diffusers_fast, "step", lambda *args: real(*args) * torch.nan)
    work = Workload(model, [TEXT])
    expected = work.run(STEPS).outputs
    cache = attach(model, profile="fast", capturer=capturer)
    assert same(work.run(STEPS).outputs, expected)
    report = cache.report()
    assert "nan" in report.fallbacks["parity_fast"].sentence
    assert report.profile == "exact"
    # JSON knows no NaN.
    assert json.loads(report.to_json())["difference"] is None


@pytest.mark.parametrize("backend", ["flash", "mem_efficient", "math", "cudnn"])
def test_torchs_switches_are_as_they_were(backend, attach, model):
    enable = getattr(torch.backends.cuda, f"enable_{backend}_sdp")
    work = Workload(model, [TEXT])
    enable(False)
    try:
        before = numeric_settings()
        cache = attach(model, profile="fast", capturer=FakeCapturer())
        work.run(STEPS)
        assert numeric_settings() == before
        assert cache.report().counts["captured"] == 1
    finally:
        enable(True)


class TestFusedLinear:
    def layers(self, **options):
        options = {"bias": False, **options}
        return [torch.nn.Linear(8, rows, **options) for rows in (4, 6)]

    def joined(self, layers):
        fused = FusedLinear(lambda: layers)
        fused.join(set())
        return fused

    def test_one_product(self):
        layers = self.layers()
        x = torch.randn(3, 8)
        expected = [layer(x) for layer in layers]
        fused = FusedLinear(lambda: layers)
        assert not fused.one
        storages = set()
        assert fused.join(storages)
        assert fused.one and len(storages) == 1
        assert not fused.join(storages), "joined twice"
        for found, wanted in zip(fused(x), expected, strict=True):
            torch.testing.assert_close(found, wanted)

    def test_what_cannot_be_joined_runs_one_by_one(self):
        class Other(torch.nn.Linear):
            pass

        mixed = self.layers()
        mixed[1] = mixed[1].to(torch.bfloat16)
        hooked = self.layers()
        hooked[0].register_forward_hook(lambda *_: None)
        cases = {
            "type Other": [*self.layers(), Other(8, 2, bias=False)],
            "differ in type": mixed,
            "hooks": hooked,
            "type Linear": self.layers(bias=True),
        }
        for why, layers in cases.items():
            addresses = [layer.weight.data_ptr() for layer in layers]
            fused = self.joined(layers)
            assert not fused.one
            assert why in fused.why_not
            assert [layer.weight.data_ptr() for layer in layers] == addresses
            if why != "differ in type":
                x = torch.randn(3, 8)
                assert all(torch.equal(a, layer(x)) for a, layer in zip(fused(x), layers))
        attention = Attention("some", None)
        linears = {"qkv": [self.joined(self.layers()), fused]}
        kernels = FastModel([], 1e-6, TorchOps(), attention, linears).kernels
        assert kernels["qkv"] == "one product in 1 of 2 blocks (a layer of type Linear)"

    def test_parting_leaves_a_replaced_weight_alone(self):
        model = torch.nn.ModuleList(self.layers())
        storages = set()
        FusedLinear(lambda: model).join(storages)
        other = torch.ones(6, 8)
        model[1].weight.data = other
        part(model, storages)
        assert model[1].weight.data_ptr() == other.data_ptr()
        assert model[0].weight.untyped_storage().nbytes() == model[0].weight.nbytes
        assert not storages

    def test_without_memory_they_stay_apart(self, monkeypatch):
        def fail(_):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        layers = self.layers()
        fused = FusedLinear(lambda: layers)
        with monkeypatch.context() as patched:
            patched.setattr(torch, "cat", fail)
            assert not fused.join(set())
        assert "no memory" in fused.why_not
        assert fused.join(set()), "tried again at the next prefill"


class TestWhatTheFastStepDoesNotKnow:
    """The exact profile runs, and the report says why."""

    @pytest.fixture
    def exact(self, attach, model, capturer):
        def check(detail):
            work = Workload(model, [TEXT])
            expected = work.run(STEPS).outputs
            cache = attach(model, profile="fast", capturer=capturer)
            assert same(work.run(STEPS).outputs, expected)
            report = cache.report()
            assert report.profile == "exact"
            assert report.counts["captured"] == 1
            assert detail in report.fallbacks["profile_exact"].sentence

        return check

    def test_activation(self, exact, model):
        model.transformer_blocks[1].img_mlp.activation_fn = torch.nn.GELU()
        exact("activation GELU")

    def test_norm(self, exact, model):
        model.transformer_blocks[0].img_norm2 = torch.nn.LayerNorm(256)
        exact("norm LayerNorm")

    def test_norm_of_keys(self, exact, model):
        model.transformer_blocks[0].attn.norm_k = torch.nn.Identity()
        exact("norm Identity of query or key")

    def test_several_kinds_of_attention(self, exact, model):
        model.transformer_blocks[0].attn.set_attention_backend("_native_math")
        exact("several kinds")

    def test_dropout(self, exact, model):
        model.transformer_blocks[0].attn.to_out[1] = torch.nn.Identity()
        exact("dropout")


def test_a_chosen_attention_is_kept(attach, model):
    model.set_attention_backend("_native_math")
    work = Workload(model, [TEXT])
    cache = attach(model, profile="fast")
    work.run(STEPS)
    assert cache.report().kernels["attention"] == "_native_math"
    # And the next choice, without another cache.
    model.set_attention_backend("native")
    work.run(STEPS)
    assert cache.report().kernels["attention"] == "torch's choice"


def test_the_report_tells_it_to_people(attach, model):
    cache = attach(model, profile="fast")
    Workload(model, [TEXT]).run(STEPS)
    report = cache.report()
    assert "fast profile (" in report.line() and "from exact)" in report.line()
    assert "qkv: one product" in report.table()
    assert "relative difference to the exact step" in report.table()
