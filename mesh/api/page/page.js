"use strict";
// The mesh at a glance, who asks, and the jobs.

import { drawChoice } from "./chat.js";
import { GONE, administers, events, hasKey, listen, refusal, send, useKey } from "./daemon.js";
import { allowChanges, drawDeployed } from "./deployed.js";
import { allowStopping, drawDownloads } from "./downloads.js";
import { at, button, clock, dim, lasting, made, ms, row } from "./elements.js";

const status = {};
const happened = [];
let lastId = 0;
const EVENT_FIELDS = ["name", "state", "shard_id", "phase", "reason"];
let following = new AbortController();
const ABOUT_KEYS = "`hearthnet keys create --scope admin` makes one that may deploy, scale and evict."
  + " It is kept in this tab only.";

// Following the daemon

async function follow(signal) {
  for (let wait = 1; !signal.aborted; wait = Math.min(2 * wait, 15)) {
    let why = "it ended the connection";
    try {
      // What is shown is asked for once more: a daemon that was started anew counts from one again.
      const headers = { "Last-Event-ID": String(Math.max(0, lastId - happened.length)) };
      const response = await listen("mesh/v1/events?with=status", { headers, signal });
      if (response.status === 401 || response.status === 403) {
        const said = await refusal(response);
        if (!signal.aborted) needKey(said);
        return;
      }
      if (!response.ok) throw new Error(await refusal(response));
      const may = await administers(signal);
      if (signal.aborted) return;
      allow(may);
      let isFirst = true;
      for await (const update of events(response)) {
        if (signal.aborted) return;
        if (update.error) throw new Error(update.error.message);
        wait = 1;
        if (isFirst) happened.length = 0;
        isFirst = false;
        take(update);
      }
    } catch (error) {
      why = error.message;
    }
    if (signal.aborted) return;
    document.body.classList.add("stale");
    headline("bad", `✖ ${why.startsWith(GONE) ? why : `${GONE} (${why})`}`);
    for (let left = wait; left > 0 && !signal.aborted; left -= 1) {
      at("again").textContent = `Trying again in ${left} s.`;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
    if (!signal.aborted) at("again").textContent = "Trying again.";
  }
}

// Browsers have six connections to a daemon, whatever tabs there are, and following takes one of
// them: a tab that nobody looks at leaves its own to the others.
function followAnew() {
  following.abort();
  following = new AbortController();
  at("again").textContent = "";
  if (!document.hidden) follow(following.signal);
}
document.addEventListener("visibilitychange", followAnew);

// Anew, as whoever has this key; without one, as anybody.
function begin(given) {
  following.abort();
  useKey(given);
  delete status.jobs;
  allowChanges(false);
  allowStopping(false);
  showKeyForm(false, "");
  at("key-open").hidden = false;
  at("key-open").textContent = hasKey() ? "Forget the key" : "Use a key";
  followAnew();
}

function allow(may) {
  allowChanges(may);
  allowStopping(may);
  if (hasKey()) {
    at("key-said").textContent = may ? "" : "This key has no scope `admin`: nothing is changed with it.";
  }
}

function needKey(said) {
  headline("wait", "◌ this daemon wants a key");
  at("again").textContent = "";
  allowChanges(false);
  allowStopping(false);
  showKeyForm(true, `${said} \`hearthnet keys create\` makes one. It is kept in this tab only.`);
  at("key-open").hidden = !hasKey();  // a wrong one can be forgotten
}

function showKeyForm(isShown, said) {
  at("key-form").hidden = !isShown;
  at("key-open").setAttribute("aria-expanded", String(isShown));
  at("key-said").textContent = said;
  if (isShown) at("key").focus();
}

at("key-open").addEventListener("click", () => {
  if (hasKey()) begin("");
  else showKeyForm(at("key-form").hidden, at("key-form").hidden ? ABOUT_KEYS : "");
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = at("key").value.trim();
  at("key").value = "";
  begin(given);
  at("key-open").focus();
});

function take(update) {
  document.body.classList.remove("stale");
  at("again").textContent = "";
  Object.assign(status, update.status);
  lastId = update.last_id;
  happened.push(...update.events);
  happened.splice(0, happened.length - 8);
  if (!status.node) return;
  draw();
  if (update.status.jobs || !status.jobs) drawJobs();
}

// Drawing

const GLYPHS = { ok: "●", wait: "◌", bad: "✖", dim: "○" };
// What is said where no model answers; of several that are silent, the first of these counts.
const VERDICTS = { wait: "starting", dim: "at rest", bad: "not working" };

// Written when it is another: whoever hears the page hears it each time it is written.
function headline(state, text) {
  at("headline").className = state;
  if (at("headline").textContent !== text) at("headline").textContent = text;
}

function people() {
  const own = { key: status.node.id, name: status.node.name,
    state: status.node.paused ? "wait" : "ok",
    word: status.node.paused ? "paused" : "here", rtt: null, shards: status.shards };
  // By ids, so that nobody's letter changes with a name; strangers behind all others.
  const peers = status.peers.filter((peer) => peer.state !== "this node")
    .sort((a, b) => (a.state === STRANGER) - (b.state === STRANGER)
      || (a.id || "~").localeCompare(b.id || "~"))
    .map((peer) => ({ key: peer.id, name: peer.name || peer.address, rtt: peer.rtt_ms,
      ...health(peer), shards: peer.shards }));
  return [own, ...peers].map((node, number) => ({ ...node, number,
    letter: number < 26 ? String.fromCharCode(65 + number) : "*" }));
}

const STRANGER = "other hearth";

function health(peer) {
  if (peer.state === STRANGER) return { state: "dim", word: STRANGER };
  if (peer.state !== "up") return { state: "bad", word: peer.state };
  const isWell = !peer.verdict || peer.verdict === "healthy";
  if (isWell) return { state: "ok", word: "up" };
  return { state: peer.verdict === "lost" ? "bad" : "wait", word: peer.verdict };
}

// How a model that cannot be asked at once is, by the reason.
function silence(reason) {
  if (reason === "loading") return "wait";
  return (reason || "").startsWith("at rest") ? "dim" : "bad";
}

function draw() {
  const nodes = people();
  drawHeadline(nodes);
  at("nodes").replaceChildren(...nodes.map((node) => row(
    made("span", `badge n${node.number % 8}`, node.letter), made("strong", "", node.name),
    made("span", node.state, `${GLYPHS[node.state]} ${node.word}`),
    node.rtt === null ? null : dim(ms(node.rtt)),
    dim(node.shards.map((shard) => `${shard.model_id} ${shard.layers}`).join(", ") || "no layers"))), ...away(status.node.away || []));
  at("models").replaceChildren(...status.models.flatMap((model) => [row(
    made("strong", "", model.id), dim(`${model.total_layers} layers`),
    model.runnable ? made("span", "ok", "● ready") : unready(model)), bar(model, nodes)]));
  at("answers").replaceChildren(...(status.generations.length
    ? status.generations.map(answer) : [dim("none runs")]), ...status.loads.map(loading));
  drawDeployed(status);
  drawDownloads(status.weights);
  drawChoice(status.models);
  at("events").replaceChildren(...(happened.length ? happened.slice().reverse().map((event) =>
    made("li", "dim", [clock(event.at, true), event.type, ...EVENT_FIELDS.map((name) => event[name])].filter(Boolean).join(" "))) : [dim("none yet")]));
}

// Members that are seen nowhere, and for how long.
function away(rows) {
  const names = rows.map((row) => row.last_seen === null ? row.name
    : `${row.name} (${lasting(Math.max(0, Date.now() - Date.parse(row.last_seen)) / 1000)})`);
  return names.length ? [dim(`away: ${names.join(", ")}`)] : [];
}

function unready(model) {
  const state = silence(model.reason);
  return made("span", state, `${GLYPHS[state]} ${model.reason || "cannot be asked"}`);
}

function loading(load) {
  const done = load.total_bytes ? ` · ${Math.floor(100 * load.done_bytes / load.total_bytes)} %` : "";
  return dim(`◌ loading ${load.name}${done}`);
}

function drawHeadline(nodes) {
  const ready = status.models.filter((model) => model.runnable).map((model) => model.id);
  const up = nodes.filter((node) => node.state === "ok" || node.state === "wait").length;
  if (ready.length) {
    headline("ok", `● working · ${ready.join(", ")} · ${up} node${up === 1 ? "" : "s"}`);
  } else {
    const why = status.models.map((model) => `${model.id}: ${model.reason}`).join("; ");
    const states = status.models.map((model) => silence(model.reason));
    const state = Object.keys(VERDICTS).find((each) => states.includes(each)) || "bad";
    headline(state, `${GLYPHS[state]} ${VERDICTS[state]} · ${why || "nobody holds a model"}`);
  }
}

function bar(model, nodes) {
  const line = made("div", "bar");
  line.setAttribute("role", "img");
  const said = [];
  for (let layer = 0; layer < model.total_layers; layer += 1) {
    const holders = nodes.filter((node) => node.state !== "bad" && node.shards.some((shard) => {
      const [first, last] = shard.layers.split("-").map(Number);
      return shard.model_id === model.id && layer >= first && layer <= (last ?? first);
    }));
    const cell = made("span", holders.length ? `n${holders[0].number % 8}` : "gap",
      holders.length ? holders[0].letter : "");
    if (holders.length > 1) cell.classList.add("more");
    cell.title = `layer ${layer}: ${holders.map((node) => node.name).join(", ") || "nobody"}`;
    said.push(cell.title);
    line.append(cell);
  }
  line.setAttribute("aria-label", model.missing.length
    ? `${model.id} lacks layers ${model.missing.join(", ")}` : `all layers of ${model.id} are held`);
  return line;
}

function answer(running) {
  const total = running.route.reduce((sum, hop) => sum + (hop.p50_ms || 0), 0);
  const slowest = running.route.reduce(
    (worst, hop) => (hop.p50_ms > (worst ? worst.p50_ms : 0) ? hop : worst), null);
  const speed = running.tokens_per_second;
  return made("div", "",
    row(made("strong", "", running.model), dim(speed ? `${speed.toFixed(1)} tok/s`
      : running.queued ? `waits for room, number ${running.queued} in line` : "reading the prompt"),
      running.failovers ? made("span", "wait", `⚠ ${running.failovers} failover(s)`) : null),
    row(...running.route.map((hop) => made("span", hop === slowest ? "wait" : "",
      `${hop === slowest && running.route.length > 1 ? "▲ " : ""}${hop.node} ${hop.layers} ${ms(hop.p50_ms || 0)}`))),
    total ? dim(`all hops ${ms(total)} a token`) : null);
}

function drawJobs() {
  const jobs = status.jobs;
  if (!jobs) {
    at("jobs").replaceChildren(dim("a key with the scope `interventions` shows jobs"));
    return;
  }
  const focused = document.activeElement.dataset.job;
  const rows = [...jobs.jobs.map((job) => jobRow(job, true)),
    ...jobs.ended.slice(0, 6).map((job) => jobRow(job, false))];
  at("jobs").replaceChildren(...(rows.length ? rows : [dim("none")]));
  [...at("jobs").querySelectorAll("button")].find((each) => each.dataset.job === focused)?.focus();
}

function jobRow(job, isLive) {
  const line = row(made("strong", "", job.status.toLowerCase()), dim(job.model), dim(job.id.slice(0, 8)),
    dim(String(job.description).split("\n")[0].slice(0, 80)));
  if (isLive) {
    const name = job.id.slice(0, 8);
    const end = button("End", `End the job ${name}`, async () => {
      if (!window.confirm(`End the job ${name}? Its client is told.`)) return;
      try {
        await send("POST", `mesh/v1/jobs/${encodeURIComponent(job.id)}/kill`, {});
      } catch (error) {
        window.alert(`The job ${name} was not ended: ${error.message}`);
      }
    });
    end.className = "end";
    end.dataset.job = job.id;
    line.append(end);
  }
  return line;
}

begin("");
