// What the reader chooses and does: setting, pass, version, language, theme, and the step.
"use strict";

const given = JSON.parse(el("given").textContent);
const player = {
  setting: { ...given.setting }, pass: "forward", version: 2, lang: "en", theme: "auto",
  at: 0, timer: null, speed: 1, c: null, events: [], states: [], other: [],
};

function compute() {
  player.c = makeCase(player.setting);
  player.events = traceOf(player.setting, player.pass, player.version);
  player.other = traceOf(player.setting, player.pass, 3 - player.version);
  const { Q, K, V, dO } = player.c;
  let state = { Q, K, V, dO };
  player.states = player.events.map(event => (state = { ...state, ...event.values }));
  player.at = Math.min(player.at, player.events.length - 1);
  el("position").max = player.events.length - 1;
  drawChecked();
}

function draw() {
  const event = player.events[player.at], words = WORDS[player.lang];
  const view = {
    ...player, event, words, state: player.states[player.at],
    fresh: new Set(Object.keys(event.values)), used: new Set(USES[event.op] ?? []),
  };
  drawStep(view);
  drawGrid(view);
  drawLevels(view);
  drawCosts(view);
  drawWarps(view);
  el("position").value = player.at;
  el("position").setAttribute("aria-valuetext", el("where").textContent);
  el("count").textContent = `${player.at + 1} / ${player.events.length}`;
  el("back").disabled = el("first").disabled = player.at === 0;
  el("next").disabled = el("last").disabled = player.at === player.events.length - 1;
  remember();
}

function drawWords() {
  const words = WORDS[player.lang];
  document.documentElement.lang = player.lang;
  document.title = words.title;
  for (const node of document.querySelectorAll("[data-word]")) node.textContent = words[node.dataset.word];
  for (const node of document.querySelectorAll("[data-label]")) {
    node.setAttribute("aria-label", words[node.dataset.label]);
    if (node.tagName === "BUTTON") node.title = words[node.dataset.label];
  }
  for (const name of ["pass", "version", "lang", "theme"]) {
    for (const button of el(name).children)
      button.setAttribute("aria-pressed", String(button.dataset.value === String(player[name])));
  }
  document.documentElement.dataset.theme = player.theme;
  for (const input of el("setting").elements) {
    if (input.name) input.value = player.setting[input.name] ?? "";
  }
  el("summary").textContent = words.summary(player.setting, words[player.setting.mask]);
  drawChecked();
}

// The Python trace travels with the page for the setting that it was made for.
function drawChecked() {
  const theirs = given.traces?.[`${player.pass} ${player.version}`];
  const same = JSON.stringify(given.setting) === JSON.stringify(player.setting);
  el("checked").hidden = !theirs || !same;
  if (!theirs || !same) return;
  const difference = largestDifference(theirs, plainEvents(player.events));
  el("checked").textContent = `${WORDS[player.lang].checked} ${difference.toExponential(0)}`;
}

function largestDifference(a, b) {
  if (typeof a === "number" && typeof b === "number") return Math.abs(a - b);
  if (a && b && typeof a === "object") {
    const keys = new Set([...Object.keys(a), ...Object.keys(b)]);
    return Math.max(0, ...[...keys].map(key => largestDifference(a[key], b[key])));
  }
  return a === b ? 0 : Infinity;
}

// ---- moving -------------------------------------------------------------------------------------
function go(to) {
  player.at = Math.max(0, Math.min(to, player.events.length - 1));
  if (player.at === player.events.length - 1) stop();
  draw();
}

function stop() {
  clearTimeout(player.timer);
  player.timer = null;
  el("say").setAttribute("aria-live", "polite");
  setPlayButton("play", "M4 2.5v11L13 8z");
}

function play() {
  if (player.at === player.events.length - 1) player.at = 0;
  // Each step spoken while it plays would never end.
  el("say").setAttribute("aria-live", "off");
  setPlayButton("pause", "M4 3h3v10H4zM9 3h3v10H9z");
  const tick = () => {
    go(player.at + 1);
    if (player.timer) player.timer = setTimeout(tick, 1000 / player.speed);
  };
  player.timer = setTimeout(tick, 1000 / player.speed);
  draw();
}

function setPlayButton(word, path) {
  const button = el("play");
  button.dataset.label = word;
  button.title = WORDS[player.lang][word];
  button.setAttribute("aria-label", button.title);
  button.querySelector("path").setAttribute("d", path);
}

const toggle = () => (player.timer ? stop() : play());

function changeSpeed(by) {
  const select = el("speed");
  select.selectedIndex = clamp(select.selectedIndex + by, 0, select.length - 1);
  player.speed = Number(select.value);
}

// ---- choosing -----------------------------------------------------------------------------------
function choose(name, value) {
  player[name] = name === "version" ? Number(value) : value;
  if (name === "pass" || name === "version") {
    stop();
    player.at = 0;
    compute();
  }
  drawWords();
  draw();
}

function cycle(name) {
  const values = [...el(name).children].map(button => button.dataset.value);
  choose(name, values[(values.indexOf(String(player[name])) + 1) % values.length]);
}

function readSetting() {
  const next = { ...player.setting };
  for (const input of el("setting").elements) {
    if (!input.name) continue;
    if (input.tagName === "SELECT") next[input.name] = input.value;
    else if (input.name === "softmax_scale") {
      next.softmax_scale = input.value === "" || !Number.isFinite(input.valueAsNumber) ? null : input.valueAsNumber;
    } else {
      const value = Math.round(input.valueAsNumber);
      if (Number.isFinite(value)) next[input.name] = clamp(value, Number(input.min), Number(input.max));
    }
  }
  useSetting(next);
}

function useSetting(setting) {
  stop();
  player.setting = setting;
  player.at = 0;
  compute();
  drawWords();
  draw();
}

// ---- the address ----------------------------------------------------------------------------------
function remember() {
  const all = { pass: player.pass, version: player.version, lang: player.lang, step: player.at };
  for (const [name, value] of Object.entries(player.setting)) {
    if (value !== given.setting[name]) all[name] = value ?? "auto";
  }
  history.replaceState(null, "", `#${new URLSearchParams(all)}`);
}

function recall() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const pick = (name, values, otherwise) => (values.includes(wanted.get(name)) ? wanted.get(name) : otherwise);
  player.pass = pick("pass", ["forward", "backward"], "forward");
  player.version = Number(pick("version", ["1", "2"], "2"));
  player.lang = pick("lang", ["en", "zh"], navigator.language.startsWith("zh") ? "zh" : "en");
  player.theme = pick("theme", ["auto", "light", "dark"], "auto");
  player.setting = { ...given.setting };
  for (const input of el("setting").elements) {
    const text = wanted.get(input.name);
    if (!input.name || text === null) continue;
    if (input.tagName === "SELECT") player.setting[input.name] = pick(input.name, [...input.options].map(o => o.value), "full");
    else if (input.name === "softmax_scale") player.setting.softmax_scale = Number.isFinite(parseFloat(text)) ? parseFloat(text) : null;
    else if (Number.isInteger(Number(text))) player.setting[input.name] = clamp(Number(text), Number(input.min), Number(input.max));
  }
  player.at = Math.max(0, Number.parseInt(wanted.get("step"), 10) || 0);
}

// ---- wiring ---------------------------------------------------------------------------------------
const KEYS = {
  ArrowRight: () => { stop(); go(player.at + 1); }, ArrowLeft: () => { stop(); go(player.at - 1); },
  Home: () => { stop(); go(0); }, End: () => { stop(); go(player.events.length - 1); },
  " ": toggle, "+": () => changeSpeed(1), "=": () => changeSpeed(1), "-": () => changeSpeed(-1),
  p: () => cycle("pass"), v: () => cycle("version"), l: () => cycle("lang"), t: () => cycle("theme"),
};

function start() {
  for (const name of ["pass", "version", "lang", "theme"])
    el(name).addEventListener("click", event => {
      const button = event.target.closest("button");
      if (button) choose(name, button.dataset.value);
    });
  el("first").addEventListener("click", KEYS.Home);
  el("back").addEventListener("click", KEYS.ArrowLeft);
  el("next").addEventListener("click", KEYS.ArrowRight);
  el("last").addEventListener("click", KEYS.End);
  el("play").addEventListener("click", toggle);
  el("position").addEventListener("input", event => { stop(); go(Number(event.target.value)); });
  el("speed").addEventListener("change", () => changeSpeed(0));
  el("setting").addEventListener("change", readSetting);
  el("setting").addEventListener("submit", event => event.preventDefault());
  el("reset").addEventListener("click", () => useSetting({ ...given.setting }));
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, select")) return;
    if (event.key === " " && event.target.closest("button")) return;
    const action = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  window.addEventListener("hashchange", () => { stop(); recall(); compute(); drawWords(); draw(); });
  // On a phone the setting would push the numbers off the first screen.
  el("settings").open = !matchMedia("(max-width: 860px)").matches;
  recall();
  compute();
  drawWords();
  draw();
}

start();
