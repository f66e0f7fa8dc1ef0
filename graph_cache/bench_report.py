"""A benchmark's results for people: a page with a table, and plots."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_COLOURS = {
    "diffusers": "#9aa0a6",
    "diffusers use_kv_cache": "#3c4043",
    "buffers": "#1d5fa8",
    "graph": "#1f7a3d",
    "fast": "#a35200",
}


def write_report(data: dict, table: str, folder: Path) -> list[Path]:
    """Write ``<gpu>.json``, ``<gpu>.md`` and, where matplotlib is installed, ``<gpu>.png``.

    Parameters
    ----------
    data
        ``machine``, ``dtype``, ``steps`` and ``rows``, as `graph_cache.bench` makes them.
    table
        The rows in Markdown.
    folder
        Made if it is not there.

    Returns
    -------
    list of Path
        What was written.
    """
    machine = data["machine"]
    name = re.sub(r"[^a-z0-9]+", "-", (machine["gpu"] or machine["cpu"]).lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    results, page, picture = (folder / f"{name}.{kind}" for kind in ("json", "md", "png"))
    results.write_text(json.dumps(data, indent=1) + "\n")
    written = [results, page]
    lines = [f"# {machine['gpu'] or machine['cpu']}, {data['dtype']}", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items() if value is not None]
    lines += [f"- steps: {data['steps']}", "", table, ""]
    if _plot(data, picture):
        lines += [f"![ms a step]({picture.name})", ""]
        written.append(picture)
    page.write_text("\n".join(lines))
    return written


def _plot(data: dict, path: Path) -> bool:
    """Draw the plots; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = data["rows"]
    figure, ((over_size, over_references), (host, share)) = pyplot.subplots(2, 2, figsize=(12, 9))
    one = [row for row in rows if row["batch"] == 1 and row["conditionings"] == 1]
    plain = [row for row in one if not row["references"]]
    _lines(over_size, plain, "size", "wall_ms")
    _labels(over_size, "ms a step", "side of the picture, px", "ms")
    largest = max((row["size"] for row in one if row["references"]), default=0)
    _lines(over_references, [row for row in one if row["size"] == largest], "references", "wall_ms")
    _labels(over_references, f"ms a step, {largest} px", "reference images", "ms")
    _host_bars(host, plain)
    _labels(host, "host (hatched) and GPU time of a step", "side of the picture, px", "ms")
    _lines(share, [row for row in plain if row["ceiling_ms"]], "size", "share")
    _labels(share, "ceiling / step", "side of the picture, px", "share of what the chip can do")
    share.set_ylim(0, 1.05)
    machine = data["machine"]
    figure.suptitle(
        f"{machine['gpu'] or machine['cpu']}, {data['dtype']}, torch {machine['torch']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return True


def _engines(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["engine"] for row in rows))


def _value(row: dict, what: str) -> float:
    return row["ceiling_ms"] / row["wall_ms"] if what == "share" else row[what]


def _lines(axes: Any, rows: list[dict], across: str, what: str) -> None:
    """A line an engine."""
    for engine in _engines(rows):
        points = sorted((row[across], _value(row, what)) for row in rows if row["engine"] == engine)
        axes.plot(*zip(*points), marker="o", label=engine, color=_COLOURS.get(engine))
    axes.set_xticks(sorted({row[across] for row in rows}))


def _host_bars(axes: Any, rows: list[dict]) -> None:
    """Two bars an engine and size."""
    engines, sizes = _engines(rows), sorted({row["size"] for row in rows})
    width = 0.8 / max(1, len(engines))
    for number, engine in enumerate(engines):
        found = {row["size"]: row for row in rows if row["engine"] == engine}
        at = [index + number * width for index, size in enumerate(sizes) if size in found]
        present = [found[size] for size in sizes if size in found]
        look = {"color": _COLOURS.get(engine), "width": width / 2}
        axes.bar(at, [row["gpu_ms"] or 0 for row in present], label=engine, **look)
        beside = [place + width / 2 for place in at]
        axes.bar(beside, [row["host_ms"] for row in present], hatch="///", alpha=0.5, **look)
    axes.set_xticks([index + 0.4 for index in range(len(sizes))], [str(size) for size in sizes])


def _labels(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
