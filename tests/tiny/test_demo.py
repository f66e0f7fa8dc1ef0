"""The demonstration on the small trained model: pictures, an edit, and the same without a cache."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.tiny.captions import parse
from examples.tiny.checker import check
from graph_cache import demo
from graph_cache.demo_pipeline import load_small
from graph_cache.demo_sheet import SIDE, Cell, draw_sheet, largest_difference

ROOT = Path(__file__).parents[2]
CPU_ONLY = not torch.cuda.is_available()


@pytest.fixture
def run(model_folder, tmp_path, monkeypatch, capsys):
    """Runs the command on the model; what it printed."""
    # As `make demo` takes it: without being asked for.
    monkeypatch.setattr(demo, "TRAINED", model_folder)

    def run(*options: str) -> str:
        assert demo.main([*options, "--out", str(tmp_path)]) == 0
        return capsys.readouterr().out

    return run


def _read(file: Path) -> np.ndarray:
    with Image.open(file) as image:
        return np.asarray(image)


def _made(pipe, prompt: str, image=None) -> np.ndarray:
    made = pipe(
        prompt,
        image=image,
        height=256,
        width=256,
        output_resolution=256,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(0),
    )
    return np.asarray(made.images[0])


def test_it_makes_a_picture_an_edit_and_a_sheet(run, tmp_path, model_folder):
    printed = run("--steps", "4")
    picture, edit = _read(tmp_path / "image.png"), _read(tmp_path / "edit.png")
    assert picture.shape == edit.shape == (256, 256, 4)
    assert not np.array_equal(picture, edit)
    if CPU_ONLY:
        pipe = load_small(model_folder)
        assert np.array_equal(picture, _made(pipe, demo.PROMPT))
        assert np.array_equal(edit, _made(pipe, demo.EDIT, [Image.fromarray(picture)]))
    sheet = _read(tmp_path / "sheet.png")
    assert sheet.shape[1] > 3 * SIDE and sheet.shape[0] > 2 * SIDE
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["calls"], report["mode"], report["error"]) == (4, "auto", None)
    assert report["path"] == ("buffers" if CPU_ONLY else "graph")
    assert f"prompt: {demo.PROMPT}" in printed
    assert f"edit: {demo.EDIT}" in printed
    assert str(model_folder) in printed and "noise" not in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith("    ")]
    assert [row[0] for row in rows] == ["stock", "buffers", "no" if CPU_ONLY else "graph"] * 2
    assert all(row[-1] == "0" and row[-2] == "ms" and float(row[-3]) > 0 for row in rows)
    assert ("no CUDA: buffers" in printed) == CPU_ONLY
    for name in ("image.png", "edit.png", "sheet.png", "report.json"):
        assert str(tmp_path / name) in printed


def test_it_shows_what_was_asked_for(run, trained, tmp_path):
    run()
    for name, text in (("image", demo.PROMPT), ("edit", demo.PROMPT.replace("red", "green"))):
        verdict = check(_read(tmp_path / f"{name}.png"), parse(text))
        assert verdict.all, verdict


@pytest.mark.parametrize(
    ("options", "edit"),
    [
        (["--prompt", "a small green star"], demo.EDIT_OF_ANY),
        (["--edit", "remove the red circles"], "remove the red circles"),
        (["--edit", ""], None),
        (["--image", "IMAGE", "--prompt", "make the star black"], None),
    ],
)
def test_the_edit(options, edit, run, tmp_path):
    Image.new("RGB", (40, 60), "red").save(tmp_path / "reference.png")
    options = [str(tmp_path / "reference.png") if o == "IMAGE" else o for o in options]
    printed = run("--steps", "2", "--size", "64", "--no-compare", *options)
    assert (tmp_path / "edit.png").exists() == (edit is not None)
    assert edit is None or f"edit: {edit}," in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["conditionings"][0]["references"] == ("--image" in options)


@pytest.mark.parametrize("mode", ["buffers", "off"])
def test_a_mode_that_is_asked_for_runs_alone(mode, run, tmp_path):
    run("--steps", "2", "--size", "64", "--mode", mode)
    assert not (tmp_path / "sheet.png").exists()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mode"] == mode
    run("--steps", "2", "--size", "64", "--mode", mode, "--compare")
    assert (tmp_path / "sheet.png").exists()
    assert json.loads((tmp_path / "report.json").read_text())["mode"] == mode


@pytest.mark.parametrize(
    "options",
    [["--prompt", "a red Hexagon"], ["--edit", "paint the hexagon"]],
)
def test_a_word_that_it_does_not_know_is_named(options, model_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--model", str(model_folder), "--out", str(tmp_path), *options])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if "error:" in line]
    assert "this small model does not know" in line and "'hexagon'" in line
    assert "circle" in line
    assert not list(tmp_path.iterdir())


def test_a_picture_that_differs_is_reported(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "largest_difference", lambda ours, theirs: 3)
    assert demo.main(["--steps", "2", "--size", "64", "--out", str(tmp_path)]) == 1
    assert "please report this" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make, which is not installed")
@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({"EDIT": 'make "it" red'}, '--edit make "it" red'),
        ({"COMPARE": "1", "EDIT": ""}, "--edit  --compare"),
        ({"COMPARE": "0"}, "--no-compare"),
        ({}, ""),
    ],
)
def test_make_passes_it_on(given, passed):
    settings = [f"{name}={value}" for name, value in given.items()]
    done = subprocess.run(
        ["make", "-s", "demo", "PY=echo", *settings],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"-m graph_cache.demo {passed}".strip()


# --- the sheet --------------------------------------------------------------------------------


def test_the_sheet_shows_what_is_clear_and_scales_what_is_large(tmp_path):
    clear, large = Image.new("RGBA", (64, 64)), Image.new("RGB", (1024, 512), "red")
    file = tmp_path / "sheet.png"
    draw_sheet([("a title", [Cell(clear, ["below"]), Cell(large, ["a", "b"])])], file)
    page = _read(file)
    grey = (page[..., 0] == page[..., 1]) & (page[..., 1] == page[..., 2])
    seen = {int(level) for level in np.unique(page[30:90, 12:76][grey[30:90, 12:76]])}
    assert {205, 235} <= seen
    assert (page == (255, 0, 0)).all(-1).sum() == SIDE * SIDE // 2


def test_the_largest_difference_counts_every_channel():
    one = Image.new("RGBA", (8, 8), (10, 20, 30, 255))
    other = one.copy()
    assert largest_difference(one, other) == 0
    other.putpixel((3, 3), (10, 20, 30, 248))
    assert largest_difference(one, other) == 7
    with pytest.raises(ValueError, match=r"\(8, 8\) and \(4, 4\)"):
        largest_difference(one, one.resize((4, 4)))
