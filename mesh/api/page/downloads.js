"use strict";
// What is fetched to this machine and to others; for whoever may, a button that stops a pull.

import { ask, refusal, send } from "./daemon.js";
import { at, button, come, dim, made, pace, row } from "./elements.js";

const PATH = "mesh/v1/weights";
const UNDER_WAY = { waiting: "waiting", looking: "looking for who has it" };
const boxes = new Map();
let weights = {};
let mayStop = false;

// Their boxes stay where they are, so that a button can be hit while the numbers beside it change.
export function drawDownloads(latest) {
  weights = latest || {};
  const here = (weights.transfers || []).map((transfer) => [`here ${transfer.id}`, transfer]);
  const far = (weights.elsewhere || []).map((each) =>
    [`far ${each.node_id} ${each.model_id} ${each.weights_sha256}`, each]);
  const moving = new Map([...here, ...far]);
  for (const [name, box] of boxes) {
    if (moving.has(name)) continue;
    box.whole.remove();
    boxes.delete(name);
  }
  for (const [name, transfer] of moving) {
    if (!boxes.has(name)) boxes.set(name, newBox(transfer));
    const { whole, facts, stop } = boxes.get(name);
    facts.replaceChildren(...factsOf(transfer));
    if (stop) stop.hidden = !mayStop;
    if (!whole.isConnected) at("downloads").append(whole);
  }
  at("undownloaded").hidden = moving.size > 0;
}

export function allowStopping(may) {
  mayStop = may;
  if (!may) tell("", "");
  drawDownloads(weights);
}

function newBox(transfer) {
  const facts = made("span", "row");
  const stop = transfer.node ? null : button("Stop", `Stop fetching ${transfer.model_id}`,
    () => stopPull(transfer.id, transfer.model_id));
  return { whole: row(facts, stop), facts, stop };
}

function factsOf(transfer) {
  const names = (transfer.sources || []).map((source) => source.name).join(", ");
  return [made("strong", "", transfer.model_id), ...come(transfer.done_bytes, transfer.total_bytes),
    dim([UNDER_WAY[transfer.state], ...pace(transfer), names ? `from ${names}` : "",
      transfer.node ? `to ${transfer.node}` : "", transfer.note].filter(Boolean).join(" · "))];
}

async function stopPull(transfer, model) {
  try {
    const response = await ask(PATH);
    if (!response.ok) throw new Error(await refusal(response));
    const found = (await response.json()).pulls.find((pull) => pull.transfer === transfer);
    if (!found) {
      tell("wait", `◌ ${model} is fetched for its deployment: evicting that ends it.`);
      return;
    }
    if (!window.confirm(`Stop fetching ${model}? What has come is kept.`)) return;
    await send("POST", `${PATH}/pulls/${encodeURIComponent(found.pull)}/cancel`, {});
    tell("ok", `● ${model} is not fetched any more.`);
  } catch (error) {
    tell("bad", `✖ ${error.message}`);
  }
}

function tell(state, words) {
  at("downloads-said").className = state;
  at("downloads-said").textContent = words;
}
