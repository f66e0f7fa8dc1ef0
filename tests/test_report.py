"""The report: arithmetic, JSON, and what a person reads."""

import json

from helpers import SHORTER_TEXT, TEXT, counters_add_up, references

from graph_cache.reasons import Path
from graph_cache.report import RunReport
from graph_cache.workload import Workload

STEPS = 6


def test_counters_are_steps_times_conditionings(model, attach, capturer):
    cache = attach(model, capturer=capturer)
    Workload(model, [TEXT, SHORTER_TEXT]).run(STEPS)
    report = cache.report()
    assert counters_add_up(report, STEPS, 2)
    assert report.counts == {"prefill": 2, "captured": 2, "replayed": 6, "eager": 2}
    assert report.eager_reasons == {"warm_up": 2}
    assert [step.conditioning for step in report.steps] == [0, 1] * STEPS


def test_json_holds_what_the_run_was(model, attach, capturer):
    cache = attach(model, capturer=capturer)
    Workload(model, [references(2)], batch=2).run(STEPS)
    data = json.loads(cache.report().to_json())
    assert data["schema"] == 1
    assert data["path"] == "graph"
    assert data["calls"] == STEPS == sum(data["counts"].values())
    assert data["eager_reasons"] == {"warm_up": 1}
    assert data["fallbacks"][0]["code"] == "warm_up"
    assert data["fallbacks"][0]["expected"] is True
    assert data["captures"] == 1
    assert data["graph_bytes"] == 1000
    assert data["entries"] == 1
    (conditioning,) = data["conditionings"]
    layout = references(2)
    assert conditioning["prefix_tokens"] == layout.prefix_tokens
    assert conditioning["target_tokens"] == layout.target_tokens
    assert conditioning["references"] == 2
    assert conditioning["batch"] == 2
    assert 0 < conditioning["buffer_bytes"] <= data["buffer_bytes"]
    assert data["verified"] == {"body": True, "replay": True}
    times = data["ms_per_call"]
    assert sum(row["calls"] for row in times.values()) == STEPS
    assert all(row["host_ms"] > 0 and row["gpu_ms"] is None for row in times.values())


def test_the_table_says_everything_once(model, attach):
    cache = attach(model)
    Workload(model, [TEXT]).run(STEPS)
    table = cache.report().table()
    rows = dict(line.rsplit(maxsplit=3)[:2] for line in table.splitlines()[1:3])
    assert rows == {"prefill": "1", "eager (no_cuda)": str(STEPS - 1)}
    assert table.count("CUDA graphs need a CUDA device; this run is on cpu.") == 1
    assert "held:" in table


def test_the_line_tells_prefix_and_references(model, attach, capturer):
    cache = attach(model, capturer=capturer)
    Workload(model, [references(3)]).run(STEPS)
    prefix = references(3).prefix_tokens
    assert f"graph: 4/{STEPS} calls as a graph, 1 eager (warm_up)" in cache.report().line()
    assert f"prefix {prefix} tokens (refs=3)" in cache.report().line()


def test_a_report_without_a_run():
    report = RunReport()
    assert report.calls == 0
    assert report.path is Path.NATIVE
    assert json.loads(report.to_json())["counts"]["eager"] == 0
    assert "total" in report.table()
    assert report.line().startswith("native: 0/0")


def test_what_is_freed_is_not_reported_as_held(model, attach, capturer):
    cache = attach(model, capturer=capturer)
    Workload(model, [TEXT]).run(STEPS)
    assert cache.report().buffer_bytes > 0
    cache.clear()
    assert cache.report().buffer_bytes == cache.report().graph_bytes == 0
    assert cache.report().counts["replayed"] == STEPS - 3
