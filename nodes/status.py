"""Telling what happened: to the browser while the node is on screen, and as a node's output."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable

from comfy_api.latest import io, ui

from ..graph_cache import Fallback, RunReport
from .inputs import schema

logger = logging.getLogger("graph_cache")

EVENT = "qwen_image_graph.status"
"""Name of the websocket event that carries a report."""

_NO_RUN = "No run yet: place a Qwen-Image 2.1 Graph Cache node in front of a sampler."

_last: RunReport | None = None


def publisher(node_id: str | None) -> Callable[[RunReport], None]:
    """Something that shows a node's reports on that node.

    Parameters
    ----------
    node_id
        The node's execution id, "459:490" inside a subgraph.
    """

    def publish(report: RunReport) -> None:
        global _last
        _last = report
        logger.info("graph cache: %s", report.line())
        _send(node_id, report.line(), report.to_dict())

    return publish


def _send(node_id: str | None, line: str, report: dict) -> None:
    # Not imported: where ComfyUI runs without its server, nobody is looking.
    prompt_server = getattr(sys.modules.get("server"), "PromptServer", None)
    server = getattr(prompt_server, "instance", None)
    if server is None or node_id is None:
        return
    server.send_progress_text(line, node_id)
    server.send_sync(EVENT, {"node": node_id, "line": line, "report": report})


def left_alone(node_id: str | None, why: Fallback) -> None:
    """Say on a node that it does nothing here, and why."""
    logger.warning("graph cache: %s %s", why.sentence, why.hint)
    report = RunReport()
    report.note(why)
    _send(node_id, f"{why.sentence} {why.hint}", report.to_dict())


def status_of(report: RunReport | None, why: Fallback | None = None) -> str:
    """A STATUS output: the report as JSON; without a run, one that only says why."""
    if report is None:
        report = RunReport()
        if why is not None:
            report.note(why)
    return report.to_json()


def readable(status: str) -> str:
    """A STATUS for people; what is no STATUS is shown as it is."""
    try:
        report = json.loads(status)
        counts, fallbacks = report["counts"], report["fallbacks"]
        calls = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        lines = [f"mode {report['mode']}, path {report['path']}: {calls or 'no steps'}"]
        for kind, row in report["ms_per_call"].items():
            gpu = "" if row["gpu_ms"] is None else f", {row['gpu_ms']} ms GPU"
            lines.append(f"{kind}: {row['host_ms']} ms host{gpu}")
        lines += [f"{found['code']}: {found['sentence']} {found['hint']}" for found in fallbacks]
        if report["error"]:
            lines.append(f"ended by {report['error']}")
    except (ValueError, TypeError, KeyError):
        return status
    return "\n".join(lines)


class QwenImage21GraphStatus(io.ComfyNode):
    """Shows a STATUS, or the last run's report."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node as ComfyUI shows it."""
        return schema(
            node_id="QwenImage21GraphStatus",
            display_name="Qwen-Image 2.1 Graph Status",
            description="Shows what the graph cache did in a run, and why. Connect a STATUS, or "
            "leave it alone to see the last run's.",
            inputs=[
                io.String.Input(
                    "status",
                    optional=True,
                    force_input=True,
                    tooltip="STATUS of a sampler node; empty for the last run's report.",
                ),
                io.Latent.Input(
                    "after",
                    optional=True,
                    tooltip="Connect any sampler's LATENT, so that this node runs after it.",
                ),
            ],
            outputs=[io.String.Output("text", tooltip="The report as text.")],
            is_output_node=True,
            # Alone it has no inputs that could tell ComfyUI that there is something new to show.
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> object:
        """Alone, the node shows whatever run was the last one; so it is never up to date."""
        return float("nan")

    @classmethod
    def execute(cls, status: str | None = None, after: dict | None = None) -> io.NodeOutput:
        """Show the report."""
        if status is None:
            status = _NO_RUN if _last is None else _last.to_json()
        text = readable(status)
        return io.NodeOutput(text, ui=ui.PreviewText(text))
