"""The fast profile over ComfyUI's model: near to its own step, or exact with a reason."""

import pytest
import torch
from helpers import FakeCapturer, counters_add_up

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def bench(kind, monkeypatch):
    """Without the native model, a stand-in that has the real blocks' mathematics."""
    from workbench import Workbench

    from graph_cache.models.comfyui import fast_step

    made = Workbench(kind, full=True)
    if kind == "standin":
        monkeypatch.setitem(fast_step.KNOWN_CODE, fast_step.code_of(made.model), "stand-in")
    return made


def away(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("cfg", [1.0, 3.0])
@pytest.mark.parametrize("references", [0, 2])
def test_near_to_comfyuis_own_picture(bench, references, cfg, batch):
    from workbench import prompt

    job = {
        "positive": prompt(1, references=references),
        "negative": prompt(2, tokens=5, references=references),
        "cfg": cfg,
        "batch": batch,
    }
    theirs = bench.sample(**job)
    ours, _ = bench.patch(profile="fast", capturer=FakeCapturer())
    assert 0 < away(bench.sample(ours, **job), theirs) < 1e-5
    report = bench.report
    assert (report.profile, report.path.value) == ("fast", "graph")
    assert set(report.fallbacks) <= {"warm_up", "no_cuda"}
    assert 0 < report.difference < 1e-5
    assert report.kernels["elementwise"] == "torch"
    assert counters_add_up(report, 5, 1 if cfg == 1.0 else 2)


def test_in_mode_buffers(bench):
    theirs = bench.sample()
    ours, _ = bench.patch(profile="fast", mode="buffers")
    assert 0 < away(bench.sample(ours), theirs) < 1e-5
    assert bench.report.profile == "fast"


def test_the_model_is_left_as_it_is(bench):
    theirs = bench.sample()
    addresses = [weight.data_ptr() for weight in bench.model.parameters()]
    ours, _ = bench.patch(profile="fast")
    bench.sample(ours)
    assert [weight.data_ptr() for weight in bench.model.parameters()] == addresses
    assert torch.equal(bench.sample(), theirs)


def test_code_that_is_another_is_exact(bench, monkeypatch):
    """ComfyUI changes weekly: the fast step computes what it knows."""
    kind = type(bench.model.transformer_blocks[0].attn)
    forward = kind.forward

    def other(self, x, *args, **kwargs):
        return forward(self, x, *args, **kwargs) * 1.02

    monkeypatch.setattr(kind, "forward", other)
    theirs = bench.sample()
    ours, _ = bench.patch(profile="fast")
    assert torch.equal(bench.sample(ours), theirs)
    assert bench.report.profile == "exact"
    assert "another version" in bench.report.fallbacks["profile_exact"].sentence


def test_a_step_that_is_too_far_away_is_nobodys_picture(bench, monkeypatch):
    from workbench import prompt

    from graph_cache.models.comfyui import fast_step

    job = {"positive": prompt(1, references=2), "negative": prompt(2, tokens=5), "cfg": 3.0}
    theirs = bench.sample(**job)
    real = fast_step.step
    monkeypatch.setattr(fast_step, "step", lambda *args: real(*args) * 1.05)
    ours, _ = bench.patch(profile="fast", capturer=FakeCapturer())
    assert torch.equal(bench.sample(ours, **job), theirs)
    assert bench.report.eager_reasons == {"parity_fast": 8}
    assert bench.report.profile == "exact"
    # Each run of a node decides anew, unless it keeps its cache.
    assert torch.equal(bench.sample(ours, **job), theirs)


@pytest.mark.parametrize("why", ["norm with a weight", "another part", "a chosen attention"])
def test_what_the_fast_step_does_not_know_is_exact(bench, monkeypatch, why):
    block = bench.model.transformer_blocks[1]
    if why == "norm with a weight":
        norm = torch.nn.LayerNorm(bench.model.inner_dim, eps=1e-6)
        monkeypatch.setitem(block._modules, "img_norm2", norm)
        detail = "norms with weights"
    elif why == "another part":
        monkeypatch.setitem(block._modules, "gate", torch.nn.Identity())
        detail = "other parts of a block: gate"
    else:
        monkeypatch.setattr("graph_cache.models.comfyui.fast_step._GIVES_WAY", set())
        detail = "was chosen"
    theirs = bench.sample()
    ours, _ = bench.patch(profile="fast")
    assert torch.equal(bench.sample(ours), theirs)
    assert bench.report.profile == "exact"
    assert detail in bench.report.fallbacks["profile_exact"].sentence
