"""Telling what happened: to the browser while the node is on screen, and as a node's output."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from comfy_api.latest import io

from ..graph_cache import Fallback, RunReport
from ..graph_cache.models.comfyui import Live
from .inputs import schema

logger = logging.getLogger("graph_cache")

EVENT = "qwen_image_graph.status"
"""Name of the websocket event that carries where a run is, or its report."""
UI_KEY = "qwen_image_graph"
"""Under which a node's own output carries its report."""

_NO_RUN = "No run yet: place a Qwen-Image 2.1 Graph Cache node in front of a sampler."
_SECONDS_BETWEEN = 0.15
"""Of two messages about steps; a browser need not draw more often."""

_MOST_REPORTS = 200
"""Of nodes, kept for a page that is loaded again."""

reports: OrderedDict[str, tuple[str | None, dict]] = OrderedDict()
"""The last report of each node with its workflow, by the node's id, the oldest first."""
_last: RunReport | None = None


_readout_is_there = False
"""Whether a browser has loaded our readout. Without it, ComfyUI's own progress texts have to do."""


def readout_is_there() -> None:
    """Called when a readout asks for the earlier reports."""
    global _readout_is_there
    _readout_is_there = True


class Publisher:
    """Shows a node's runs on that node.

    Parameters
    ----------
    node_id
        The node's execution id, "459:490" inside a subgraph; None where there is no node.
    """

    def __init__(self, node_id: str | None) -> None:
        self._node_id = node_id
        self._next = 0.0
        self._workflow: str | None = None

    def live(self, live: Live) -> None:
        """A step has ended."""
        now = time.monotonic()
        if now < self._next and live.step < live.steps:
            return
        self._next = now + _SECONDS_BETWEEN
        line = f"{live.mode}: step {live.step}/{live.steps}, {live.step_ms:.0f} ms, {live.kind}"
        self._send(line, {"live": asdict(live)})

    def finished(self, report: RunReport) -> None:
        """A run has ended, one way or another."""
        logger.info("graph cache: %s", report.line())
        self._tell(report.line(), report)
        # The next run can be another page's, of another workflow.
        self._workflow = None

    def left_alone(self, why: Fallback) -> None:
        """The node does nothing here, and why."""
        logger.warning("graph cache: %s %s", why.sentence, why.hint)
        report = RunReport()
        report.note(why)
        self._tell(f"{why.sentence} {why.hint}", report)
        self._workflow = None

    def _tell(self, line: str, report: RunReport) -> None:
        global _last
        _last = report
        content = report.to_dict()
        if self._node_id is not None:
            reports[self._node_id] = (self._running_workflow(), content)
            reports.move_to_end(self._node_id)
            if len(reports) > _MOST_REPORTS:
                reports.popitem(last=False)
        self._send(line, {"report": content})

    def _running_workflow(self) -> str | None:
        """Asked once a run."""
        self._workflow = self._workflow or running_workflow()
        return self._workflow

    def _send(self, line: str, content: dict) -> None:
        server = prompt_server()
        if server is None or self._node_id is None:
            return
        if not _readout_is_there:
            server.send_progress_text(line, self._node_id)
        workflow = self._running_workflow()
        event = {"node": self._node_id, "workflow": workflow, "line": line, **content}
        # To the page that asked for the run; to all of them where none did.
        server.send_sync(EVENT, event, getattr(server, "client_id", None))


def running_workflow() -> str | None:
    """Id of the workflow that is being run, as its page saved it; None where nobody tells.

    Node ids are a workflow's own, and a page can show another one by now.
    """
    queue = getattr(prompt_server(), "prompt_queue", None)
    # The later one does not copy whole workflows.
    ask = getattr(queue, "get_current_queue_volatile", getattr(queue, "get_current_queue", None))
    try:
        running, _ = ask()
        return running[0][3]["extra_pnginfo"]["workflow"]["id"]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def prompt_server() -> Any | None:
    """ComfyUI's server; None where ComfyUI runs without it, and nobody is looking."""
    # Not imported: that would start half of ComfyUI where it is not running.
    found = getattr(sys.modules.get("server"), "PromptServer", None)
    return getattr(found, "instance", None)


def status_of(report: RunReport | None, why: Fallback | None = None) -> str:
    """A STATUS output: the report as JSON; without a run, one that only says why."""
    if report is None:
        report = RunReport()
        if why is not None:
            report.note(why)
    return report.to_json()


def as_report(status: str) -> dict | None:
    """A STATUS as data; None for any other text."""
    try:
        report = json.loads(status)
    except ValueError:
        return None
    return report if isinstance(report, dict) and "schema" in report else None


def readable(status: str) -> str:
    """A STATUS for people; what is no STATUS is shown as it is."""
    report = as_report(status)
    if report is None:
        return status
    try:
        counts, fallbacks = report["counts"], report["fallbacks"]
        calls = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
        lines = [f"mode {report['mode']}, path {report['path']}: {calls or 'no steps'}"]
        for kind, row in report["ms_per_call"].items():
            gpu = "" if row["gpu_ms"] is None else f", {row['gpu_ms']} ms GPU"
            lines.append(f"{kind}: {row['host_ms']} ms host{gpu}")
        lines += [f"{found['code']}: {found['sentence']} {found['hint']}" for found in fallbacks]
        if report["error"]:
            lines.append(f"ended by {report['error']}")
    except (TypeError, KeyError, AttributeError):
        # Of another version of the pack.
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
            outputs=[io.String.Output("text", display_name="text", tooltip="The report as text.")],
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
        return io.NodeOutput(text, ui={"text": (text,), UI_KEY: (as_report(status),)})
