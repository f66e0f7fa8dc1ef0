"""The two command lines, run as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image

from graph_cache import bench, demo
from graph_cache.tiny import TinyProcessor, tiny_pipeline

ROOT = Path(__file__).parents[1]


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_demo(tmp_path):
    done = run("graph_cache.demo", "--out", str(tmp_path), "--size", "64", "--steps", "6")
    assert done.returncode == 0, done.stderr
    with Image.open(tmp_path / "image.png") as image:
        assert image.size == (64, 64)
        # Random weights make noise, but never one flat colour.
        assert np.asarray(image).std() > 10
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["calls"] == 6
    assert report["error"] is None
    if torch.cuda.is_available():
        assert report["path"] == "graph"
        assert report["counts"] == {"prefill": 1, "captured": 1, "replayed": 3, "eager": 1}
    else:
        assert report["path"] == "buffers"
        assert "mode reached: buffers" in done.stdout
        assert "CUDA graphs need a CUDA device; this run is on cpu." in done.stdout
    for word in ("prefill", "eager", "ms host", "ms GPU", "held:", "image.png"):
        assert word in done.stdout
    assert "Traceback" not in done.stderr


def test_demo_gives_the_same_picture_without_the_cache(tmp_path):
    images = {}
    for mode in ("auto", "off"):
        options = ["--size", "64", "--steps", "5", "--mode", mode, "--out", str(tmp_path / mode)]
        assert demo.main(options) == 0
        with Image.open(tmp_path / mode / "image.png") as image:
            images[mode] = np.asarray(image)
        report = json.loads((tmp_path / mode / "report.json").read_text())
        assert (report["eager_reasons"] == {"off": 4}) == (mode == "off")
    assert np.array_equal(images["auto"], images["off"])


@pytest.mark.parametrize("pictures", [0, 2])
def test_demo_on_a_model_folder(pictures, tmp_path, monkeypatch, capsys):
    """A pipeline folder as it is published, except for the processor: that needs a vocabulary."""
    folder, out = tmp_path / "model", tmp_path / "out"
    pipe = tiny_pipeline(seed=4)
    for name in ("transformer", "vae", "text_encoder", "scheduler"):
        getattr(pipe, name).save_pretrained(folder / name)
    index = {
        "_class_name": "QwenImage21Pipeline",
        "transformer": ["diffusers", "QwenImage21Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage21"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    load = QwenImage21Pipeline.from_pretrained
    monkeypatch.setattr(
        QwenImage21Pipeline,
        "from_pretrained",
        lambda path, **options: load(path, processor=TinyProcessor(), **options),
    )
    options = ["--model", str(folder), "--prompt", "a blue cat", "--size", "64", "--steps", "5"]
    references = []
    for index in range(pictures):
        Image.new("RGB", (70, 50), (index * 90, 40, 200)).save(tmp_path / f"{index}.png")
        options += ["--image", str(tmp_path / f"{index}.png")]
        with Image.open(tmp_path / f"{index}.png") as opened:
            references.append(opened.convert("RGBA"))
    assert demo.main([*options, "--out", str(out)]) == 0
    expected = pipe(
        "a blue cat",
        image=references or None,
        height=64,
        width=64,
        output_resolution=64,
        num_inference_steps=5,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    if not torch.cuda.is_available():
        with Image.open(out / "image.png") as image:
            assert np.array_equal(np.asarray(image), np.asarray(expected))
    report = json.loads((out / "report.json").read_text())
    assert report["conditionings"][0]["references"] == pictures
    assert str(folder) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such/folder"], "there is nothing at /no/such/folder"),
        (["--model", "tests"], "is no diffusers pipeline: it has no model_index.json"),
        (["--size", "100"], "100 is not a multiple of 32"),
        (["--size", "big"], "'big' is no number of pixels"),
        (["--steps", "0"], "'0' is no positive number of steps"),
        (["--image", "nothing.png"], "cannot read nothing.png"),
    ],
)
def test_demo_says_what_is_wrong(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("index", "message"),
    [("{}", "is of a None, not of this pipeline"), ("{", "is not valid JSON")],
)
def test_demo_on_a_folder_that_is_none(index, message, tmp_path, capsys):
    (tmp_path / "model_index.json").write_text(index)
    with pytest.raises(SystemExit):
        demo.main(["--model", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_bench(tmp_path):
    file = tmp_path / "results" / "bench.json"
    done = run(
        *("graph_cache.bench", "--device", "cpu", "--steps", "5", "--cases", "64", "64:0:2:2"),
        *("--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["machine"]["torch"] == torch.__version__
    assert "--cases 64 64:0:2:2" in data["machine"]["command"]
    assert len(data["rows"]) == 2 * len(bench.ENGINES)
    for row in data["rows"]:
        assert row["wall_ms"] > 0 and row["host_ms"] > 0 and row["ratio"] > 0
        if row["engine"] not in ("diffusers", "fast"):
            assert row["equal"] is True
            assert row["difference"] == 0
        if row["engine"] == "fast":
            assert 0 < row["difference"] < 1e-5
            assert row["kernels"]["qkv"] == "one product"
        if row["engine"].startswith(("buffers", "graph")):
            conditionings = 2 if "cfg" in row["case"] else 1
            assert sum(row["counts"].values()) == 5 * conditionings
            assert row["verified"]["body"] is True
    assert "| 64 px, batch 2, cfg | graph (none here) |" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "1000"], "size 1000 is not a multiple of 32"),
        (["--cases", "512:11"], "0-10 references"),
        (["--cases", "x"], "'x' is not SIZE"),
        (["--steps", "3"], "--steps must be at least 5"),
    ],
)
def test_bench_says_what_is_wrong(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_fails_when_a_picture_differs(monkeypatch):
    from graph_cache.models import diffusers_step

    real = diffusers_step.decode
    monkeypatch.setattr(diffusers_step, "decode", lambda *args: real(*args) + 1)
    monkeypatch.setattr("graph_cache.steps.bitwise_equal", lambda a, b: True)
    options = ["--device", "cpu", "--steps", "5", "--cases", "64", "--engines", "buffers"]
    assert bench.main(options) == 1
