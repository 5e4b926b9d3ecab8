"use strict";
// What is deployed; for whoever may change it, the verbs, each after its estimate or a question.

import { send } from "./daemon.js";
import { at, button, bytes, clock, come, dim, line, made, memory, ms, pace, row } from "./elements.js";

const PATH = "mesh/v1/deployments";
const SETTINGS = ["quant", "context", "dedicated", "nodes", "layers"];
const PHASES = {
  READY: ["ok", "●", "ready"], PARTLY: ["wait", "◌", "answers, not all is up"],
  QUEUED: ["wait", "◌", "waiting"], PROVISIONING: ["wait", "◌", "fetching"],
  DEPLOYING: ["wait", "◌", "loading"], LEAVING: ["wait", "◌", "unloading"],
  FAILED: ["bad", "✖", "failed"], AWAY: ["bad", "✖", "its node is away"],
  RESTING: ["dim", "○", "resting"],
};
const COUNTED = ["PROVISIONING", "DEPLOYING"];  // bytes that come, or that are loaded
const boxes = new Map();
let status = {};
let mayChange = false;

// Their boxes stay where they are: a button keeps the focus while what is beside it changes.
export function drawDeployed(latest) {
  status = latest;
  const wishes = deployments();
  const names = new Set(wishes.map((wish) => wish.deployment));
  for (const [name, box] of boxes) {
    if (names.has(name)) continue;
    box.whole.remove();
    boxes.delete(name);
  }
  wishes.forEach((wish, place) => {
    if (!boxes.has(wish.deployment)) boxes.set(wish.deployment, newBox(wish));
    const { whole, facts, verbs } = boxes.get(wish.deployment);
    facts.replaceChildren(...factsOf(wish));
    if (mayChange && !verbs.isConnected) whole.append(verbs);
    if (!mayChange) verbs.remove();
    const there = at("deployed").children[place];
    if (there !== whole) at("deployed").insertBefore(whole, there || null);
  });
  at("undeployed").hidden = !status.node || wishes.length > 0;
  at("wish-open").hidden = !mayChange;
}

// Offer the verbs from now on, or no more.
export function allowChanges(may) {
  mayChange = may;
  if (!may) at("wish").close();
  if (!may) tell("", "");
  drawDeployed(status);
}

const deployments = () => status.deployments || [];
const named = (name) => deployments().find((wish) => wish.deployment === name);

function newBox(wish) {
  const facts = made("div", "");
  const name = wish.deployment;
  const verbs = row(
    button("Scale", `Scale ${wish.model_id}`, () => named(name) && openWish(named(name))),
    button("Evict", `Evict ${wish.model_id}`, () => named(name) && evict(named(name))));
  return { whole: made("div", "", facts), facts, verbs };
}

function factsOf(wish) {
  const many = wish.replicas === 1 ? "replica" : "replicas";
  return [row(made("strong", "", wish.model_id), phase(wish.state),
    dim(`${wish.replicas_ready} of ${wish.replicas} ${many}`), wish.level ? dim(wish.level) : null,
    wish.rests_at ? dim(`rests ${clock(wish.rests_at)}`) : null),
  ...wish.spans.map((span) => {
    // How far another node is, only that one knows.
    const isFar = span.phase === "QUEUED" && !span.reason && span.node_id !== status.node.id;
    return row(dim(`${span.node} ${span.layers}`),
      isFar ? made("span", "wait", "◌ not up yet")
        : phase(span.phase, span.reason ? `: ${span.reason}` : ""),
      ...(COUNTED.includes(span.phase)
        ? [...come(span.done_bytes, span.total_bytes), dim(pace(span).filter(Boolean).join(" · "))]
        : []));
  }),
  ...(wish.missing.length
    ? [row(made("span", "bad", `nobody serves layers ${wish.missing.join(", ")}`))] : [])];
}

function phase(name, more = "") {
  const [state, glyph, words] = PHASES[name] || ["wait", "◌", String(name).toLowerCase()];
  return made("span", state, `${glyph} ${words}${more}`);
}

function tell(state, words) {
  at("deployed-said").className = state;
  at("deployed-said").textContent = words;
}

// Evicting

async function evict(wish) {
  if (!window.confirm(whatEnds(wish))) return;
  try {
    await send("DELETE", `${PATH}/${encodeURIComponent(wish.deployment)}`, {});
    tell("ok", `● ${wish.model_id} is evicted.`);
    at("wish-open").focus();
  } catch (error) {
    tell("bad", `✖ ${error.message}`);
  }
}

function whatEnds(wish) {
  const held = wish.spans.filter((span) => span.phase === "READY")
    .map((span) => `${span.layers} on ${span.node}`).join(", ");
  const running = status.generations.filter((each) => each.model === wish.model_id).length;
  return [`Evict ${wish.model_id}?`, held ? `Unloaded: ${held}.` : "Nothing of it is loaded.",
    running ? `Answers running now, which must go another way or end: ${running}.` : "",
    "What is on disk stays."].filter(Boolean).join(" ");
}

// The wish: what is typed, its estimate beside it, and only then the verb.

let scaled = null;
let estimating = new AbortController();

function openWish(wish = null) {
  scaled = wish;
  at("wish-form").reset();
  at("wish-title").textContent = wish ? `Scale ${wish.model_id}` : "Deploy a model";
  at("wish-send").textContent = wish ? "Scale" : "Deploy";
  at("wish-model").value = wish ? wish.model_id : "";
  at("wish-model").disabled = wish !== null;
  at("wish-replicas").min = wish ? 0 : 1;
  at("wish-replicas").value = wish ? wish.replicas : 1;
  at("wish-settings").hidden = wish !== null;
  at("wish-known").replaceChildren(...knownModels().map((name) => new Option(name, name)));
  forget();
  at("wish").showModal();
  at(wish ? "wish-replicas" : "wish-model").focus();
}

function knownModels() {
  const names = [...deployments().map((wish) => wish.model_id),
    ...(status.models || []).map((model) => model.id),
    ...(status.weights?.models || []).flatMap((held) => [held.id, held.origin])];
  return [...new Set(names.filter(Boolean))].sort();
}

function ordered() {
  const order = { model: at("wish-model").value.trim(), replicas: Number(at("wish-replicas").value) };
  if (scaled) return order;
  const nodes = at("wish-nodes").value.split(",").map((name) => name.trim()).filter(Boolean);
  if (at("wish-quant").value) order.quant = at("wish-quant").value;
  if (at("wish-context").value) order.context = Number(at("wish-context").value);
  if (nodes.length) order.nodes = nodes;
  return order;
}

// What an order leaves out stays as it is where the model is deployed.
function settings(order) {
  const before = scaled || deployments().find((wish) => wish.model_id === order.model) || {};
  return Object.fromEntries(SETTINGS.filter((name) => before[name]).map((name) => [name, before[name]]));
}

// Another wish: what was estimated is of none.
function forget() {
  estimating.abort();
  estimating = new AbortController();
  at("wish-send").disabled = true;
  at("wish-said").replaceChildren(dim("Enter shows what it would need and give, before it is done."));
}

// What looks bad is not what Enter does next.
function offer(lines, isGood) {
  at("wish-said").replaceChildren(...lines);
  at("wish-send").disabled = false;
  at(isGood ? "wish-send" : "wish-leave").focus();
}

async function estimate() {
  forget();
  const { signal } = estimating;
  const order = ordered();
  if (order.replicas === 0) {
    offer([line("", "No replica stays loaded; what is on disk stays.")], true);
    return;
  }
  at("wish-said").replaceChildren(line("dim", "◌ is being estimated …"));
  try {
    const plan = await send("POST", "mesh/v1/plan", { ...settings(order), ...order }, signal);
    if (!signal.aborted) offer(planned(plan), plan.refusal === null);
  } catch (error) {
    if (!signal.aborted) offer([line("bad", `✖ no estimate: ${error.message}`)], false);
  }
}

function planned(plan) {
  const { refusal } = plan;
  return [
    ...(refusal ? [line("bad", `✖ it does not fit: ${refusal.message}`), line("", refusal.fix)] : []),
    ...plan.replicas.flatMap((replica, number) => [
      line("ok", `● replica ${number + 1}: about ${replica.tokens_per_second.toFixed(1)} tok/s, `
        + `first token ${ms(replica.first_token_ms)}`),
      ...replica.shards.map((shard) => line("", needs(shard))),
      line("dim", `would help: ${replica.bottleneck.help}`)]),
    ...plan.machines.filter((machine) => !machine.used).map((machine) =>
      line("dim", `○ ${machine.node}: ${memory(machine.free_bytes)} free, not used: ${machine.why}`)),
  ];
}

function needs(shard) {
  return `${shard.node} ${shard.layers}: needs ${memory(shard.need.total)} of ${memory(shard.have)} free`
    + (shard.fetch_bytes ? `, fetches ${bytes(shard.fetch_bytes)}` : "")
    + (shard.gap ? ", with a gap: old and new do not fit at once" : "");
}

const away = (gap) => `It is away for a moment: ${gap.node} drops layers ${gap.drops} before it loads `
  + `layers ${gap.loads}.`;

async function confirmed() {
  const { model, ...order } = ordered();
  const asked = scaled
    ? send("PATCH", `${PATH}/${encodeURIComponent(scaled.deployment)}`, order)
    : send("POST", PATH, { model, ...order });
  at("wish").close();
  tell("wait", `◌ ${model}: it is being asked for …`);
  try {
    const { gaps } = await asked;
    tell("ok", [`● ${model}: ${order.replicas} replica(s) are wished for.`, ...gaps.map(away)].join(" "));
  } catch (error) {
    tell("bad", `✖ ${error.message}`);
  }
}

at("wish-open").addEventListener("click", () => openWish());
at("wish-form").addEventListener("input", forget);
at("wish-form").addEventListener("submit", (event) => {
  event.preventDefault();
  estimate();
});
at("wish-send").addEventListener("click", confirmed);
at("wish-leave").addEventListener("click", () => at("wish").close());
// The event comes later than the closing: by then another wish may stand there.
at("wish").addEventListener("close", () => { if (!at("wish").open) forget(); });
