"use strict";
// The chat: whom to ask, what was said, and the answer that comes.

import { events, listen, refusal } from "./daemon.js";
import { at, made } from "./elements.js";

export function drawChoice(models) {
  const choice = at("model");
  // Whoever was chosen stays chosen while it cannot be asked.
  const names = models.filter((model) => model.runnable || model.local
    || model.id === choice.value).map((model) => model.id);
  if (names.join("\n") === [...choice.options].map((option) => option.value).join("\n")) return;
  const before = choice.value;
  choice.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(before)) choice.value = before;
}

const CUT = "it has as many tokens as it may have (max_tokens, or the model's context)";
let turns = [];
let stopping = null;

function shown(turn) {
  const isAsked = turn.role === "user";
  const element = made("div", isAsked ? "turn mine" : "turn");
  element.role = "group";
  element.ariaLabel = isAsked ? "Question" : "Answer";
  at("turns").append(element);
  return element;
}

// The end of the conversation stays in sight, until somebody scrolls away from it. Once a frame: to
// know how long a text is takes as long as the text.
let follows = true;
let due = 0;
let seen = 0;
function toEnd() {
  due ||= requestAnimationFrame(() => {
    due = 0;
    if (follows) at("turns").scrollTop = at("turns").scrollHeight;
  });
}
at("turns").addEventListener("scroll", ({ target: { scrollTop, scrollHeight, clientHeight } }) => {
  if (scrollTop < seen) follows = false;
  else if (scrollHeight - scrollTop - clientHeight < 20) follows = true;
  seen = scrollTop;
});

at("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || stopping) return;
  if (!at("model").value) {
    at("chat-said").textContent = "✖ no model can be asked now";
    return;
  }
  at("chat-said").textContent = "";
  at("text").value = "";
  const asked = { role: "user", content: text };
  turns.push(asked);
  shown(asked).textContent = text;
  const said = { role: "assistant", content: "" };
  const element = shown(said);
  const thought = new Text();
  const words = new Text();
  const about = made("div", "dim");
  element.append(made("span", "thought", thought), made("span", "", words), about);
  follows = true;
  toEnd();
  at("turns").ariaBusy = "true";  // heard once it is whole
  swap("send", "stop");
  stopping = new AbortController();
  const told = turns;  // who clears has other turns, whatever still comes of this answer
  try {
    const cut = await receive(stopping.signal, told, (chunk) => {
      const delta = chunk.choices?.[0]?.delta || {};
      thought.appendData(delta.reasoning_content || "");
      said.content += delta.content || "";
      words.appendData(delta.content || "");
      if (chunk.hearthnet) about.textContent = happening(chunk.hearthnet) || about.textContent;
      toEnd();
    });
    if (cut) element.append(made("div", "wait", `⚠ cut off: ${cut}`));
  } catch (error) {
    const isStopped = error.name === "AbortError";
    about.className = isStopped ? "dim" : "bad";
    about.textContent = isStopped ? "stopped" : `✖ ${error.message}`;
    if (!isStopped && !said.content && !at("text").value) at("text").value = text;
  } finally {
    if (said.content) told.push(said);
    else told.splice(told.indexOf(asked), 1);
    toEnd();
    stopping = null;
    at("turns").ariaBusy = "false";
    swap("stop", "send");
  }
});

// Give each chunk of the answer to `take`. Why it is cut off, where it is; an Error where it breaks.
async function receive(signal, messages, take) {
  const response = await listen("v1/chat/completions", { method: "POST", signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model: at("model").value, messages, stream: true, temperature: 0,
      truncation: "auto" }) });
  if (!response.ok) throw new Error(await refusal(response));
  let ending = "";
  let note = "";
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    ending = chunk.choices?.[0]?.finish_reason || ending;
    note = chunk.hearthnet?.note || note;
    take(chunk);
  }
  if (!ending) throw new Error("the daemon ended the answer too early; try again");
  return ending === "length" ? note || CUT : "";
}

// What a chunk says of the route.
function happening(extension) {
  if (extension?.event) return String(extension.event.type).replaceAll("_", " ");
  if (!extension?.route) return "";
  const route = extension.route.map((hop) => `${hop.node} ${hop.layers}`).join(" ▸ ") || "here";
  const speed = extension.timings?.tokens_per_second;
  const left = extension.left_out_messages;
  return route + (speed ? ` · ${speed.toFixed(1)} tok/s` : "")
    + (extension.failovers ? ` · ${extension.failovers} failover(s), the same tokens` : "")
    + (left ? ` · without the first ${left} messages: the context has no room for all` : "");
}

// One button in the place of another, with the focus where that had it.
function swap(before, after) {
  const hadFocus = document.activeElement === at(before);
  at(before).hidden = true;
  at(after).hidden = false;
  if (hadFocus) at(after).focus();
}

at("stop").addEventListener("click", () => stopping?.abort());
at("clear").addEventListener("click", () => {
  stopping?.abort();
  turns = [];
  at("turns").replaceChildren();
  at("chat-said").textContent = "";
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("chat").requestSubmit();
  }
});
