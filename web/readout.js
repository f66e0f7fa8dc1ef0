// Shows on this pack's nodes what their cache does, on the canvas and in Vue nodes.

import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";
import { loadStrings, text } from "./strings.js";
import { Readout } from "./view.js";

const EVENT = "qwen_image_graph.status";
const UI_KEY = "qwen_image_graph";
const WITH_TOGGLE = ["QwenImage21GraphCache", "QwenImage21GraphSampler"];
const NODES = [...WITH_TOGGLE, "QwenImage21GraphStatus"];
const SETTING = { times: "QwenImageGraph.ShowMilliseconds", open: "QwenImageGraph.Expanded" };
SETTING.mode = "QwenImageGraph.DefaultMode";

const setting = (id) => app.extensionManager?.setting?.get(id);

// Last states by workflow and execution id, so that a node that is drawn anew shows its own.
const states = new Map();
const MOST_STATES = 400;

const rootGraph = () => app.rootGraph ?? app.graph?.rootGraph ?? app.graph;
const keyOf = (workflow, executionId) => `${workflow ?? rootGraph()?.id ?? ""} ${executionId}`;

// The node of an execution id; "459:490" leads through the subgraph of node 459.
function nodeOf(executionId) {
  let graph = rootGraph();
  let node = null;
  for (const part of String(executionId).split(":")) {
    node = graph?.getNodeById?.(Number(part)) ?? graph?.getNodeById?.(part) ?? null;
    if (!node) return null;
    graph = node.subgraph ?? null;
  }
  return node;
}

// A node's execution ids: one for each way through subgraphs that leads to it.
function idsOf(node, graph = rootGraph(), path = "") {
  const ids = [];
  for (const one of graph?.nodes ?? graph?._nodes ?? []) {
    if (one === node) ids.push(`${path}${one.id}`);
    if (one.subgraph) ids.push(...idsOf(node, one.subgraph, `${path}${one.id}:`));
  }
  return ids;
}

function show(workflow, executionId, changes) {
  const key = keyOf(workflow, executionId);
  const state = { ...states.get(key), ...changes };
  states.delete(key);
  states.set(key, state);
  if (states.size > MOST_STATES) states.delete(states.keys().next().value);
  if (key !== keyOf(null, executionId)) return;
  const node = nodeOf(executionId);
  node?.qigReadout?.update(changes);
  node?.graph?.setDirtyCanvas?.(true, true);
}

const modeOf = (node) => node.widgets?.find((widget) => widget.name === "mode");

const modeIsLinked = (node) =>
  node.inputs?.some((input) => input.name === "mode" && input.link != null) ?? false;

function toggle(node) {
  const widget = modeOf(node);
  if (!widget || modeIsLinked(node)) return;
  const previous = node.qigModeBefore ?? "auto";
  if (widget.value !== "off") node.qigModeBefore = widget.value;
  widget.value = widget.value === "off" ? previous : "off";
  widget.callback?.(widget.value, app.canvas, node);
  node.graph?.setDirtyCanvas?.(true, true);
  // Undo, and the mark of an unsaved workflow.
  const tracker = app.extensionManager?.workflow?.activeWorkflow?.changeTracker;
  (tracker?.captureCanvasState ?? tracker?.checkState)?.call(tracker);
}

async function release(node) {
  let held = false;
  for (const id of idsOf(node)) {
    const answer = await api.fetchApi("/qwen_image_graph/release", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ node: id }),
    });
    if (!answer.ok && answer.status !== 404) {
      return text("releaseFailed", { why: `${answer.status} ${answer.statusText}` });
    }
    held ||= answer.ok;
  }
  return text(held ? "released" : "nothingHeld");
}

// The help page as text: ComfyUI serves its file for downloading.
async function help(nodeId) {
  const page = await fetch(new URL(`./docs/${nodeId}.md`, import.meta.url));
  const shown = new Blob([await page.text()], { type: "text/plain;charset=utf-8" });
  const url = URL.createObjectURL(shown);
  window.open(url, "_blank", "noopener");
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

async function copy(content) {
  try {
    await navigator.clipboard.writeText(content);
    return text("copied");
  } catch {
    return text("copyFailed");
  }
}

function addReadout(node, nodeId) {
  const readout = new Readout({
    toggle: () => toggle(node),
    release: WITH_TOGGLE.includes(nodeId) ? () => release(node) : null,
    copy,
    help: () => help(nodeId),
    whyNoToggle: () => {
      if (!modeOf(node)) return text("noToggle");
      return modeIsLinked(node) ? text("fromElsewhere") : null;
    },
    // By as much as the readout has grown: the rest of the height is the user's.
    resized: () => {
      const now = readout.height();
      const [width, height] = node.computeSize();
      const wanted = node.size[1] + now - (readout.heightInNode ?? now);
      readout.heightInNode = now;
      node.setSize?.([Math.max(node.size[0], width), Math.max(wanted, height)]);
      node.graph?.setDirtyCanvas?.(true, true);
    },
  });
  forwardToCanvas(readout.element);
  node.qigReadout = readout;
  readout.showTimes = setting(SETTING.times) ?? true;
  const widget = node.addDOMWidget("readout", "qwen_image_graph", readout.element, {
    serialize: false,
    hideOnZoom: false,
    getMinHeight: () => readout.height(),
    getMaxHeight: () => readout.height(),
  });
  // The one keeps it out of the prompt, the other out of the workflow's saved values.
  widget.serialize = false;
  const mode = modeOf(node);
  if (mode) {
    const theirs = mode.callback;
    mode.callback = function (value, ...more) {
      readout.update({ mode: value });
      return theirs?.apply(this, [value, ...more]);
    };
  }
  readout.actions.resized();
  // A workflow that is being loaded has its sizes already.
  if (setting(SETTING.open) && !app.configuringGraph) readout.expand(true);
}

// On the canvas, the wheel and the middle button move the canvas, wherever the pointer is.
function forwardToCanvas(element) {
  const onCanvas = () => !window.LiteGraph?.vueNodesMode;
  element.addEventListener("wheel", (event) => {
    if (!onCanvas()) return;
    event.preventDefault();
    app.canvas.processMouseWheel(event);
  });
  const forward = {
    pointerdown: ["processMouseDown", (event) => event.button === 1],
    pointermove: ["processMouseMove", (event) => (event.buttons & 4) === 4],
    pointerup: ["processMouseUp", (event) => event.button === 1],
  };
  for (const [kind, [method, isMiddle]] of Object.entries(forward)) {
    element.addEventListener(kind, (event) => {
      if (onCanvas() && isMiddle(event)) app.canvas[method]?.(event);
    });
  }
}

// Values and ids of a node are set after its creation: when it is added, and when a workflow is
// loaded. Before it is in a graph, a copy has the id of the node that it was copied from.
function refresh(node) {
  if (!node.graph) return;
  const known = idsOf(node).map((id) => states.get(keyOf(null, id)));
  const { live = null, report = null } = known.find(Boolean) ?? {};
  node.qigReadout?.update({ mode: modeOf(node)?.value ?? "auto", live, report });
}

app.registerExtension({
  name: "qwen_image_graph.readout",
  settings: [
    {
      id: SETTING.times,
      category: ["Qwen-Image 2.1 Graph Cache", "Readout", "Milliseconds"],
      name: "Show milliseconds a step on the node",
      type: "boolean",
      defaultValue: true,
      onChange: (value) => eachReadout((readout) => {
        readout.showTimes = value;
        readout.render();
      }),
    },
    {
      id: SETTING.open,
      category: ["Qwen-Image 2.1 Graph Cache", "Readout", "Expanded"],
      name: "Show the whole report on new nodes",
      type: "boolean",
      defaultValue: false,
    },
    {
      id: SETTING.mode,
      category: ["Qwen-Image 2.1 Graph Cache", "Nodes", "Mode"],
      name: "Mode of new nodes",
      type: "combo",
      options: ["auto", "buffers", "off"],
      defaultValue: "auto",
    },
  ],

  async setup() {
    await loadStrings(api, setting("Comfy.Locale") ?? "en");
    api.addEventListener(EVENT, ({ detail }) => {
      if (detail.live) show(detail.workflow, detail.node, { live: detail.live });
      else show(detail.workflow, detail.node, { live: null, report: detail.report });
    });
    // A run that ends without a report of ours must not look as if it went on.
    for (const end of ["execution_interrupted", "execution_error", "execution_success"]) {
      api.addEventListener(end, () => {
        for (const state of states.values()) state.live = null;
        eachReadout((readout) => readout.update({ live: null }));
      });
    }
    try {
      const { nodes } = await (await api.fetchApi("/qwen_image_graph/status?readout=1")).json();
      for (const { node, workflow, report } of nodes) if (report) show(workflow, node, { report });
    } catch (error) {
      console.warn("qwen_image_graph: no earlier reports:", error);
    }
    eachReadout((readout) => readout.render());
  },

  // Another workflow, or this one after an undo.
  afterConfigureGraph() {
    eachNode(refresh);
  },

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!NODES.includes(nodeData.name)) return;
    const chain = (name, ours) => {
      const theirs = nodeType.prototype[name];
      nodeType.prototype[name] = function (...given) {
        const result = theirs?.apply(this, given);
        ours.apply(this, given);
        return result;
      };
    };
    chain("onNodeCreated", function () {
      const mode = modeOf(this);
      if (mode && setting(SETTING.mode)) mode.value = setting(SETTING.mode);
      addReadout(this, nodeData.name);
    });
    for (const moment of ["onAdded", "onConfigure"]) {
      chain(moment, function () {
        refresh(this);
      });
    }
    chain("onConnectionsChange", function () {
      this.qigReadout?.render();
    });
    chain("onExecuted", function (output) {
      const report = output?.[UI_KEY]?.[0];
      if (!report) return;
      for (const id of idsOf(this)) show(null, id, { live: null, report });
    });
  },
});

function eachNode(visit, graph = rootGraph()) {
  for (const node of graph?.nodes ?? graph?._nodes ?? []) {
    if (node.qigReadout) visit(node);
    if (node.subgraph) eachNode(visit, node.subgraph);
  }
}

function eachReadout(visit) {
  eachNode((node) => visit(node.qigReadout));
}
