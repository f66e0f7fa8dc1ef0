"""The benchmark's page and plots, and the ceiling it compares with."""

import json
import sys

import pytest
import torch

from graph_cache import bench
from graph_cache.bench_report import write_report
from graph_cache.ceiling import ceiling_ms
from graph_cache.tiny import tiny_transformer
from graph_cache.workload import Case


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "results"
    cases = ["64", "128", "64:1"]
    engines = ["diffusers use_kv_cache", "graph", "fast"]
    options = ["--device", "cpu", "--steps", "5", "--ceiling", "--out", str(folder)]
    assert bench.main([*options, "--cases", *cases, "--engines", *engines]) == 0
    return folder


def test_results_page_and_plots(written):
    names = {path.suffix: path for path in written.iterdir()}
    assert set(names) == {".json", ".md", ".png"}
    data = json.loads(names[".json"].read_text())
    assert len(data["rows"]) == 9
    assert all(row["ceiling_ms"] > 0 for row in data["rows"])
    page = names[".md"].read_text()
    assert page.count("\n| 64 px, 1 ref |") == 3
    assert f"- torch: {torch.__version__}" in page
    assert f"![ms a step]({names['.png'].name})" in page
    assert names[".png"].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_are_no_plots(written, tmp_path, monkeypatch):
    data = json.loads(next(written.glob("*.json")).read_text())
    # What Python takes for a module that cannot be imported.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    kinds = {path.suffix for path in write_report(data, "| table |", tmp_path)}
    assert kinds == {".json", ".md"}
    assert ".png" not in next(tmp_path.glob("*.md")).read_text()


def test_the_ceiling_grows_with_the_step():
    model, cpu = tiny_transformer(), torch.device("cpu")
    small, large = (
        ceiling_ms(model, Case(size).layouts()[0], 1, torch.float32, cpu, seconds=0.05)
        for size in (64, 512)
    )
    assert 0 < small < large
