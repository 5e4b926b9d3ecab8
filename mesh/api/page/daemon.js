"use strict";
// Asking the daemon. The key is kept here and nowhere else: it is gone with the tab.

export const GONE = "the daemon does not answer";
const RUNS = "`hearthnet status` says whether it runs";
// A stream without news has a comment every 10 s. Who is silent for longer is gone, whatever the
// network says: a machine that sleeps, or a cable that was pulled, closes no connection.
const SILENT_MS = 30000;

let key = "";

export function useKey(given) {
  key = given;
}
export const hasKey = () => key !== "";

export async function ask(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  try {
    return await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`${GONE}; ${RUNS}`);
  }
}

// As `ask`, for a stream of `events`; `signal` ends both.
export async function listen(path, options) {
  const cutting = new AbortController();
  const signal = AbortSignal.any([options.signal, cutting.signal]);
  try {
    return await unlessSilent(ask(path, { ...options, signal }));
  } catch (error) {
    cutting.abort();  // browsers have few connections to a daemon
    throw error;
  }
}

async function unlessSilent(coming) {
  let timer = 0;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`${GONE}: it is silent; ${RUNS}`)), SILENT_MS);
  });
  try {
    return await Promise.race([coming, silence]);
  } finally {
    clearTimeout(timer);
  }
}

// What is answered to a JSON body; an Error with the daemon's sentence and fix where it refuses.
export async function send(method, path, body, signal) {
  const response = await ask(path, { method, signal, body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" } });
  if (!response.ok) throw new Error(await refusal(response));
  return response.json();
}

// Whether the key may change what is deployed. Without one nobody may, wherever that is asked.
export async function administers(signal) {
  if (!hasKey()) return false;
  const response = await ask("whoami", { signal });
  return response.ok && (await response.json()).tags.includes("admin");
}

export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the daemon answered ${response.status}`;
  }
}

async function heard(reader) {
  try {
    return await unlessSilent(reader.read());
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new Error(`the connection to the daemon broke; ${RUNS}`);  // browsers say no more
  }
}

// One object for each event of a stream, as it comes.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await heard(reader);
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((each) => each.startsWith("data: "))
          .map((each) => each.slice(6)).join("\n");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
