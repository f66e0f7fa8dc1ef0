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

// Last states by execution id, so that a node that is drawn anew shows them.
const states = new Map();

// The node of an execution id; "459:490" leads through the subgraph of node 459.
function nodeOf(executionId) {
  let graph = app.rootGraph ?? app.graph?.rootGraph ?? app.graph;
  let node = null;
  for (const part of String(executionId).split(":")) {
    node = graph?.getNodeById?.(Number(part)) ?? graph?.getNodeById?.(part) ?? null;
    if (!node) return null;
    graph = node.subgraph ?? null;
  }
  return node;
}

// A node's own execution id, as far as the canvas tells: the path of the subgraphs around it.
function idsOf(node) {
  const ids = [];
  for (const id of states.keys()) if (nodeOf(id) === node) ids.push(id);
  return ids.length ? ids : [String(node.id)];
}

function show(executionId, changes) {
  const node = nodeOf(executionId);
  const state = { ...states.get(String(executionId)), ...changes };
  if (node) state.of = node;
  states.set(String(executionId), state);
  node?.qigReadout?.update(changes);
}

const modeOf = (node) => node.widgets?.find((widget) => widget.name === "mode");

function toggle(node) {
  const widget = modeOf(node);
  if (!widget) return;
  const previous = node.qigModeBefore ?? "auto";
  if (widget.value !== "off") node.qigModeBefore = widget.value;
  widget.value = widget.value === "off" ? previous : "off";
  widget.callback?.(widget.value, app.canvas, node);
  node.graph?.setDirtyCanvas?.(true, true);
  // Undo, and the mark of an unsaved workflow.
  app.extensionManager?.workflow?.activeWorkflow?.changeTracker?.checkState?.();
}

async function release(node) {
  const answers = [];
  for (const id of idsOf(node)) {
    const answer = await api.fetchApi("/qwen_image_graph/release", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ node: id }),
    });
    if (answer.ok) return text("released");
    answers.push((await answer.json().catch(() => ({}))).error ?? String(answer.status));
  }
  return text("releaseFailed", { why: answers.join("; ") });
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
    release: () => release(node),
    copy,
    help: new URL(`./docs/${nodeId}.md`, import.meta.url).href,
    resized: () => {
      const [width, height] = node.computeSize();
      node.setSize?.([Math.max(node.size[0], width), height]);
      node.graph?.setDirtyCanvas?.(true, true);
    },
  });
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
  if (setting(SETTING.open)) readout.expand(true);
  else readout.actions.resized();
}

// Values and ids of a node are set after its creation: when it is added, and when a workflow is
// loaded. Before it is in a graph, a copy has the id of the node that it was copied from.
function refresh(node) {
  if (!node.graph) return;
  const { live = null, report = null } = states.get(idsOf(node)[0]) ?? {};
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
      if (detail.live) show(detail.node, { live: detail.live });
      else show(detail.node, { live: null, report: detail.report });
    });
    // A run that ends without a report of ours must not look as if it went on.
    for (const end of ["execution_interrupted", "execution_error", "execution_success"]) {
      api.addEventListener(end, () => {
        for (const id of states.keys()) show(id, { live: null });
      });
    }
    try {
      const { nodes } = await (await api.fetchApi("/qwen_image_graph/status?readout=1")).json();
      for (const [id, { report }] of Object.entries(nodes)) if (report) show(id, { report });
    } catch (error) {
      console.warn("qwen_image_graph: no earlier reports:", error);
    }
    eachReadout((readout) => readout.render());
  },

  // Ids are a workflow's own: what is not of this one must not show up on a later node.
  afterConfigureGraph() {
    for (const id of states.keys()) if (!nodeOf(id)?.qigReadout) states.delete(id);
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
    chain("onRemoved", function () {
      for (const [id, { of }] of states) if (of === this) states.delete(id);
    });
    chain("onExecuted", function (output) {
      const report = output?.[UI_KEY]?.[0];
      if (report) this.qigReadout?.update({ live: null, report });
    });
  },
});

function eachNode(visit, graph = app.rootGraph ?? app.graph) {
  for (const node of graph?.nodes ?? graph?._nodes ?? []) {
    if (node.qigReadout) visit(node);
    if (node.subgraph) eachNode(visit, node.subgraph);
  }
}

function eachReadout(visit) {
  eachNode((node) => visit(node.qigReadout));
}
