// What a readout shows for a state: one line while a run goes on, a badge and a report after it.
// Only the DOM and texts; nothing here knows ComfyUI.

import { text } from "./strings.js";

const STYLE = `
.qig { display: flex; flex-direction: column; gap: 4px; box-sizing: border-box; width: 100%;
  font: 12px/1.35 sans-serif; color: var(--input-text, #ddd); padding: 2px 0; }
.qig-head { display: flex; align-items: center; gap: 6px; min-height: 24px; }
.qig button, .qig a { font: inherit; color: inherit; cursor: pointer; border-radius: 4px;
  border: 1px solid var(--border-color, #4e4e4e); background: var(--comfy-input-bg, #222);
  padding: 2px 8px; text-decoration: none; white-space: nowrap; }
.qig button:focus-visible, .qig a:focus-visible { outline: 2px solid #4c9aff; outline-offset: 1px; }
.qig .qig-badge { font-weight: 600; border-color: transparent; color: #fff; background: #5c6370; }
.qig .qig-badge[data-tone="good"] { background: #1f7a3d; }
.qig .qig-badge[data-tone="fair"] { background: #1d5fa8; }
.qig .qig-badge[data-tone="warn"] { background: #a35200; }
.qig .qig-badge[data-tone="bad"] { background: #b3261e; }
.qig-line { flex: 1; min-width: 0; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.qig-body { display: flex; flex-direction: column; gap: 6px; }
.qig-body[hidden] { display: none; }
.qig-rows { display: grid; grid-template-columns: max-content 1fr; gap: 2px 10px; margin: 0; }
.qig-rows dt, .qig-why .qig-hint, .qig-note, .qig-calm { opacity: 0.82; }
.qig-rows dd { margin: 0; overflow-wrap: anywhere; }
.qig-why { margin: 0; padding-left: 16px; }
.qig-why li { margin: 2px 0; overflow-wrap: anywhere; }
.qig-buttons { display: flex; flex-wrap: wrap; gap: 4px; }
.qig-note, .qig-calm { min-height: 16px; }
.qig .qig-badge:disabled { cursor: default; }
.qig-note:empty { display: none; }
`;

function addStyle() {
  if (document.getElementById("qig-style")) return;
  const style = document.createElement("style");
  style.id = "qig-style";
  style.textContent = STYLE;
  document.head.append(style);
}

function element(tag, className, content = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = content;
  return made;
}

function button(className, label, onClick) {
  const made = element("button", className, label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

const mebibytes = (bytes) => `${Math.round(bytes / 2 ** 20).toLocaleString()} MiB`;

const countsOf = (report) =>
  Object.entries(report.counts)
    .filter(([, count]) => count)
    .map(([kind, count]) => `${count} ${text(kind)}`)
    .join(", ");

// What a run's steps were, on one line.
function whatRan(report, timed) {
  if (!report.calls) return "";
  const { replayed, captured } = report.counts;
  const ran =
    report.path === "graph"
      ? text("replayedLine", { count: replayed + captured, calls: report.calls })
      : countsOf(report);
  return [ran, ...timed(report.step_ms)].join(" · ");
}

// Badge, tone and line of a state: { mode, live, report } and whether to show milliseconds.
export function summary({ mode, live, report }, showTimes = true) {
  const timed = (ms) =>
    showTimes && ms != null ? [text("milliseconds", { ms: Math.round(ms) })] : [];
  const paths = {
    graph: ["replaying", "good"],
    buffers: ["buffers", "fair"],
    native: ["native", "plain"],
  };
  if (live) {
    const [key, tone] = live.mode === "off" ? ["off", "plain"] : paths[live.path];
    const parts = [live.mode, text("step", live), ...timed(live.step_ms), text(live.kind)];
    return { key, tone, line: parts.join(" · ") };
  }
  // What the node will do next comes before what it did.
  if (mode === "off" && report?.mode !== "off") {
    return { key: "off", tone: "plain", line: text("offLine") };
  }
  if (mode !== "off" && report?.mode === "off") report = null;
  if (report?.error) {
    const cancelled = report.error.startsWith("InterruptProcessingException");
    const key = cancelled ? "cancelled" : "failed";
    const line = cancelled ? whatRan(report, timed) : report.error;
    return { key, tone: cancelled ? "warn" : "bad", line };
  }
  if (!report) return { key: "ready", tone: "plain", line: text("readyLine") };
  const unexpected = report.fallbacks.filter((found) => !found.expected);
  const [key, calm] = report.mode === "off" ? ["off", "plain"] : paths[report.path];
  const tone = unexpected.length ? "warn" : calm;
  if (!report.calls) return { key, tone, line: unexpected[0]?.sentence ?? "" };
  return { key, tone, line: whatRan(report, timed) };
}

function rowsOf(report) {
  const rows = [[text("calls"), countsOf(report)]];
  const ms = (value) => text("milliseconds", { ms: value.toFixed(1) });
  if (report.step_ms != null) {
    const before =
      report.native_step_ms == null
        ? text("unknownBefore")
        : text("before", { ms: ms(report.native_step_ms) });
    rows.push([text("stepTime"), `${ms(report.step_ms)} (${before})`]);
  }
  if (report.seconds_saved != null) {
    const run = (report.native_step_ms / 1e3) * (report.planned_steps ?? report.calls);
    const worth = report.seconds_saved > 0.02 * run;
    const seconds = report.seconds_saved.toFixed(1);
    rows.push([text("saved"), worth ? text("seconds", { seconds }) : text("noGain")]);
  }
  for (const found of report.conditionings.filter((one) => one.prefix_tokens)) {
    const values = { tokens: found.prefix_tokens, references: found.references };
    rows.push([text("prefix"), text("prefixValue", values)]);
  }
  if (report.peak_bytes) {
    const buffers = report.conditionings.reduce((sum, one) => sum + (one.buffer_bytes ?? 0), 0);
    const graphs = Math.max(0, report.peak_bytes - buffers);
    const values = { buffers: mebibytes(buffers), graphs: mebibytes(graphs) };
    // What other sizes hold is in the sum too, and in neither part.
    const alone = report.entries <= report.conditionings.length;
    const memory = alone ? text("memoryValue", values) : mebibytes(report.peak_bytes);
    rows.push([text("memory"), memory]);
  }
  if (report.captures) {
    const values = { count: report.captures, seconds: report.capture_seconds.toFixed(2) };
    rows.push([text("captures"), text("capturesValue", values)]);
  }
  if (report.weights) rows.push([text("weights"), report.weights]);
  return rows;
}

export class Readout {
  // `actions`: { toggle(), release(), copy(text), help(), resized(), whyNoToggle() }; release, copy
  // and help may be async. Without release there is no such button; whyNoToggle says, as text, why
  // the badge cannot be clicked now, if it cannot.
  constructor(actions) {
    addStyle();
    this.actions = actions;
    this.showTimes = true;
    this.state = { mode: "auto", live: null, report: null };
    this.element = element("div", "qig");
    this.badge = button("qig-badge", "", () => actions.toggle());
    this.line = element("span", "qig-line");
    this.line.setAttribute("role", "status");
    this.shown = null;
    this.lastHeight = 34;
    this.more = button("qig-more", "▸", () => this.expand(this.body.hidden));
    const head = element("div", "qig-head");
    head.append(this.badge, this.line, this.more);
    this.body = element("div", "qig-body");
    this.body.hidden = true;
    this.element.append(head, this.body);
    this.render();
  }

  update(changes) {
    this.state = { ...this.state, ...changes };
    this.render();
  }

  expand(open) {
    this.body.hidden = !open;
    this.render();
    this.actions.resized();
  }

  // Height of what is shown, in CSS pixels before the canvas scales it.
  height() {
    if (this.body.hidden) this.lastHeight = 34;
    // While a renderer moves the element it has no width, and its text would be a line a letter.
    else if (this.element.clientWidth > 60) this.lastHeight = 44 + this.body.scrollHeight;
    return this.lastHeight;
  }

  render() {
    const { key, tone, line } = summary(this.state, this.showTimes);
    this.badge.textContent = text(key);
    this.badge.dataset.tone = tone;
    this.badge.dataset.state = key;
    const fixed = this.actions.whyNoToggle();
    const toggle = fixed ?? text(this.state.mode === "off" ? "toggleOn" : "toggleOff");
    this.badge.disabled = fixed != null;
    this.badge.title = toggle;
    this.badge.setAttribute("aria-label", `${text(key)}. ${toggle}`);
    // Several changes a second are not to be read out; the end of a run is.
    this.line.setAttribute("aria-live", this.state.live ? "off" : "polite");
    this.line.textContent = line;
    this.line.title = line;
    const open = !this.body.hidden;
    this.more.textContent = open ? "▾" : "▸";
    this.more.title = text(open ? "less" : "more");
    this.more.setAttribute("aria-label", this.more.title);
    this.more.setAttribute("aria-expanded", String(open));
    // Only what is new: a button that is replaced under the pointer is not clicked.
    if (open && this.shown !== (this.state.report ?? "none")) this.renderBody();
  }

  renderBody() {
    const { report } = this.state;
    this.shown = report ?? "none";
    const parts = [];
    if (report) {
      const rows = element("dl", "qig-rows");
      for (const [name, value] of rowsOf(report)) {
        rows.append(element("dt", "", name), element("dd", "", value));
      }
      parts.push(rows, ...this.why(report));
    } else {
      parts.push(element("div", "qig-calm", text("readyLine")));
    }
    parts.push(this.buttons(report));
    this.note = element("div", "qig-note");
    this.note.setAttribute("role", "status");
    parts.push(this.note);
    this.body.replaceChildren(...parts);
  }

  why(report) {
    const found = report.fallbacks.filter((one) => one.code !== "warm_up");
    if (!found.length) {
      return report.path === "graph" ? [element("div", "qig-calm", text("nothingToSay"))] : [];
    }
    const list = element("ul", "qig-why");
    for (const one of found) {
      const item = element("li", "");
      item.dataset.code = one.code;
      item.append(element("span", "", `${one.sentence} `), element("span", "qig-hint", one.hint));
      list.append(item);
    }
    return [element("div", "", text("reasons")), list];
  }

  buttons(report) {
    const row = element("div", "qig-buttons");
    const say = async (action) => {
      const note = await action();
      this.note.textContent = note;
      this.actions.resized();
    };
    if (report) {
      const json = JSON.stringify(report, null, 2);
      row.append(button("qig-copy", text("copy"), () => say(() => this.actions.copy(json))));
    }
    if (this.actions.release) {
      row.append(button("qig-release", text("release"), () => say(() => this.actions.release())));
    }
    row.append(button("qig-help", text("help"), () => this.actions.help()));
    return row;
  }
}
