"""The quality command: each way of a step against float32."""

import json

import pytest
import torch

from graph_cache import quality
from graph_cache.models import diffusers_fast
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Case, Workload


def test_every_way_against_float32(tmp_path, capsys):
    file = tmp_path / "results" / "quality.json"
    arguments = ["--device", "cpu", "--cases", "64", "64:1:1:2", "--steps", "4"]
    assert quality.main([*arguments, "--json", str(file)]) == 0
    data = json.loads(file.read_text())
    assert data["dtype"] == "bf16"
    assert "graph_cache.quality --device cpu --cases 64" in data["machine"]["command"]
    rows = {(row["case"], row["way"]): row for row in data["rows"]}
    assert len(rows) == 2 * len(quality.WAYS)
    said = capsys.readouterr().out
    for (case, way), row in rows.items():
        assert f"| {case} | {way} |" in said
        assert 1e-3 < row["to_float32"] < 0.02
        if way in ("stock", "exact"):
            assert (row["over_stock"], row["to_stock"]) == (1, 0)
        else:
            assert row["to_stock"] > 0
        assert bool(row["kernels"]) == (way == "fast")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_level_is_rounded(dtype):
    """Else the float32 reference would be another step, and hide what the kernels do."""
    levels = torch.tensor(quality.LEVELS, dtype=torch.float64)
    assert torch.equal(levels.to(dtype).double(), levels)


def test_float32_is_its_own_reference():
    model = tiny_transformer()
    rows = {row.way: row for row in quality.measure(model, Case(64), 3)}
    assert rows["stock"].to_float32 == 0
    assert rows["fast"].to_float32 < 1e-6
    # Whoever measures leaves the model as it was.
    assert model.transformer_blocks[0].attn.processor._attention_backend is None
    work = Workload(model, Case(64).layouts())
    assert torch.isfinite(work.run(2).outputs[-1]).all()


def test_a_fast_step_that_is_too_far_away_fails(monkeypatch, capsys):
    real = diffusers_fast.step
    monkeypatch.setattr(diffusers_fast, "step", lambda *args: real(*args) * 1.2)
    options = ["--device", "cpu", "--cases", "64", "--steps", "3"]
    assert quality.main(options) == 1
    assert "64 px: the fast step is" in capsys.readouterr().out


def test_bad_options_are_named(capsys):
    with pytest.raises(SystemExit):
        quality.main(["--cases", "1000"])
    assert "size 1000 is not a multiple of 32" in capsys.readouterr().err
