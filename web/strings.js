// The readout's texts. They live in locales/<language>/main.json, which ComfyUI serves; English
// stands here too, for a ComfyUI that does not serve them.

const ENGLISH = {
  ready: "Ready",
  readyLine: "no run yet",
  replaying: "Replaying",
  buffers: "Buffers",
  native: "Native",
  off: "Off",
  offLine: "the model runs as it is",
  cancelled: "Cancelled",
  failed: "Failed",
  prefill: "prefill",
  captured: "captured",
  replayed: "replayed",
  eager: "eager",
  step: "step {step}/{steps}",
  milliseconds: "{ms} ms",
  replayedLine: "{count} of {calls} replayed",
  toggleOff: "Turn the cache off on this node",
  toggleOn: "Turn the cache on again on this node",
  more: "Show the whole report",
  less: "Hide the report",
  calls: "Calls",
  stepTime: "A step",
  before: "{ms} without the cache",
  unknownBefore: "run once with mode off to compare",
  saved: "Time saved",
  seconds: "about {seconds} s",
  noGain: "none to be measured here",
  prefix: "Prefix",
  prefixValue: "{tokens} tokens, references: {references}",
  memory: "Memory",
  memoryValue: "{buffers} of buffers, {graphs} of graphs",
  captures: "Captures",
  capturesValue: "{count} in {seconds} s",
  weights: "Weights",
  reasons: "Why not everything is replayed",
  nothingToSay: "Everything that can be replayed is.",
  copy: "Copy report",
  copied: "Copied",
  copyFailed: "The browser does not allow copying",
  release: "Release memory",
  released: "Released",
  releaseFailed: "Nothing was released: {why}",
  help: "Help",
  fromElsewhere: "The mode comes from what is connected to it",
  noToggle: "The last run",
  nothingHeld: "Nothing is held",
};

let texts = ENGLISH;

// Take the texts of a language; what it lacks stays English.
export async function loadStrings(api, language) {
  try {
    const served = await (await api.fetchApi("/i18n")).json();
    texts = { ...ENGLISH, ...served.en?.qwenImageGraph, ...served[language]?.qwenImageGraph };
  } catch (error) {
    console.warn("qwen_image_graph: no translations:", error);
  }
}

export function text(key, values = {}) {
  return texts[key].replace(/\{(\w+)\}/g, (whole, name) => values[name] ?? whole);
}
