"""The yardstick: two engines on the same tasks, and the measures of how near pictures are."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tqdm import tqdm

from examples.tiny.evaluation import tasks
from examples.tiny.fidelity import fidelity, over_grey, psnr, spread, ssim
from examples.tiny.scenes import Background, Scene, draw
from examples.tiny.yardstick import ENGINES, Engine, compare, main, table
from graph_cache.demo_pipeline import load_small

STEPS = 4


@pytest.fixture(scope="module")
def small(model_folder):
    pipe = load_small(model_folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_command(model_folder, tmp_path, capsys):
    file = tmp_path / "figures" / "exact.json"
    options = ["--model", str(model_folder), "--count", "2", "--steps", str(STEPS)]
    assert main([*options, "--a", "off", "--b", "buffers", "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| buffers against off | prompts | edits | combinations |")
    figures = json.loads(file.read_text())
    assert "--a off --b buffers" in figures["command"]
    assert (figures["engines"]["b"]["name"], figures["steps"]) == ("buffers", STEPS)
    assert list(figures["sorts"]) == ["prompts", "edits", "combinations"]
    for each in figures["sorts"].values():
        assert each["count"] == each["equal"] == 2
        assert each["paths"] == {"a": {"native": 2}, "b": {"buffers": 2}}
        assert each["psnr"] == {"mean": None, "minimum": None, "infinite": 2}
        assert each["ssim"]["minimum"] == 1
        assert each["a"] == each["b"]
        assert each["judged_otherwise"] == 0


def test_every_engine_is_there_and_a_new_one_is_one_more_entry(small):
    assert {"stock", "kv", "whole", "off", "buffers", "auto"} <= set(ENGINES)
    guided = Engine("guided", call={"negative_prompt": "", "true_cfg_scale": 2.0})
    asked = tasks("prompts", 2)
    with tqdm(disable=True) as bar:
        result = compare(small, {"a": ENGINES["stock"], "b": guided}, asked, STEPS, bar)
        kv = compare(small, {"a": ENGINES["stock"], "b": ENGINES["kv"]}, asked, STEPS, bar)
    figures = result.to_dict()
    assert figures["equal"] == 0
    assert 0 < figures["psnr"]["minimum"] <= figures["psnr"]["mean"] < 60
    assert figures["ssim"]["minimum"] < 1
    assert figures["paths"] == {"a": {}, "b": {}}
    assert kv.to_dict()["equal"] == 2
    shown = table("stock", "guided", {"prompts": figures, "edits": kv.to_dict()})
    assert "| bitwise equal | 0 | 2 |" in shown
    assert "| all equal |" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/no/such/folder"], "there is nothing at /no/such/folder"),
        (["--model", "x", "--count", "0"], "'0' is no positive number"),
        (["--model", "x", "--b", "slow"], "invalid choice: 'slow'"),
    ],
)
def test_what_is_wrong_is_said(options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_psnr():
    flat = np.full((32, 32, 3), 100.0)
    assert psnr(flat, flat) == float("inf")
    assert psnr(flat, flat + 1) == pytest.approx(48.1308, abs=1e-4)


def test_ssim_of_flat_pictures_is_that_of_their_brightness():
    dark, light = np.full((16, 16, 1), 60.0), np.full((16, 16, 1), 120.0)
    c1 = (0.01 * 255) ** 2
    assert ssim(dark, light) == pytest.approx((2 * 60 * 120 + c1) / (60**2 + 120**2 + c1))


def test_ssim_is_the_formula_in_every_window():
    rng = np.random.default_rng(0)
    a, b = rng.uniform(0, 255, (2, 14, 13, 2))
    line = np.exp(-((np.arange(11) - 5) ** 2) / (2 * 1.5**2))
    weights = np.outer(line, line)[..., None] / np.outer(line, line).sum()
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    found = []
    for top in range(4):
        for left in range(3):
            x, y = (p[top : top + 11, left : left + 11] for p in (a, b))
            mx, my = ((weights * p).sum((0, 1)) for p in (x, y))
            vx, vy = ((weights * (p - m) ** 2).sum((0, 1)) for p, m in ((x, mx), (y, my)))
            vxy = (weights * (x - mx) * (y - my)).sum((0, 1))
            found.append(
                (2 * mx * my + c1) * (2 * vxy + c2) / ((mx**2 + my**2 + c1) * (vx + vy + c2))
            )
    assert ssim(a, b) == pytest.approx(np.mean(found))
    assert ssim(a, a) == 1


def test_what_lies_under_alpha_0_is_not_seen_but_is_not_equal():
    clear = draw(Scene((), Background("transparent")))
    tinted = clear.copy()
    tinted[..., :3] = 7
    assert np.array_equal(over_grey(clear), np.full((256, 256, 3), 128.0))
    found = fidelity(clear, tinted)
    assert (found.equal, found.psnr, found.ssim) == (False, float("inf"), 1)
    assert found.alpha_psnr == float("inf")
    tinted[..., 3] = 51
    assert fidelity(clear, tinted).alpha_psnr == pytest.approx(13.98, abs=0.01)


def test_a_spread_counts_what_is_infinite_and_leaves_it_out():
    assert spread([float("inf"), 30.0, 40.0]) == {"mean": 35, "minimum": 30, "infinite": 1}
    assert spread([float("inf")]) == {"mean": None, "minimum": None, "infinite": 1}
