"use strict";
// What everything on the page is made of. Whatever comes from the daemon is put in as text: names of
// nodes are their owners' choice.

export const at = (id) => document.getElementById(id);

export function made(tag, classes, ...inside) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...inside.filter((each) => each !== null && each !== undefined).map(
    (each) => (each instanceof Node ? each : String(each))));
  return element;
}
export const row = (...inside) => made("div", "row", ...inside);
export const dim = (text) => made("span", "dim", text);
export const line = (state, text) => made("div", state, text);

// Of an ISO time, as the clock on this wall says it.
export const clock = (time, withSeconds = false) => new Date(time).toLocaleTimeString([],
  { hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}) });

export const ms = (value) => (value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`);

// A button; its long name says to whoever hears the page what it acts on.
export function button(words, longName, act) {
  const element = made("button", "", words);
  element.type = "button";
  element.setAttribute("aria-label", longName);
  element.addEventListener("click", act);
  return element;
}

// On disks and on their way.
export function bytes(number) {
  return number >= 1e9 ? `${(number / 1e9).toFixed(1)} GB` : `${(number / 1e6).toFixed(1)} MB`;
}

// Of memory.
export function memory(number) {
  if (number >= 2 ** 30) return `${(number / 2 ** 30).toFixed(1)} GiB`;
  return `${number > 0 ? Math.max(1, Math.round(number / 2 ** 20)) : 0} MiB`;
}

export function lasting(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(0)} h`;
}

// Rounded down: all of it is said only when all of it is here.
export function come(done, total) {
  if (!total) return [];
  const bar = made("progress", "");
  bar.max = total;
  bar.value = done;
  const percent = `${Math.floor(100 * Math.min(done, total) / total)} %`;
  bar.setAttribute("aria-label", percent);
  return [bar, dim(`${percent} (${bytes(done)} of ${bytes(total)})`)];
}

export function pace(moved) {
  return [moved.bytes_per_s ? `${bytes(moved.bytes_per_s)}/s` : "",
    moved.eta_s === null || moved.eta_s === undefined ? "" : `${lasting(moved.eta_s)} left`];
}
