"use strict";
// Optional speed-up of the pages: links and forms that filter the list fetch only the list, and the scrubber shows
// another step without a request. The model's text is inserted as text, never as markup.
document.documentElement.classList.add("js");
const POLL_MS = 5000, LIMIT_MS = 30000, AHEAD = 2;
const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// The list -----------------------------------------------------------------------------------------------------------
const results = find("#results");
const folded = new Map();
let asking = null, areFiltersOpen = false;

function isPlain(event) {
  return event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
}

async function narrow(address, { keepsHistory = false } = {}) {
  if (asking) asking.abort();
  const mine = asking = new AbortController();
  const timer = setTimeout(() => mine.abort(), LIMIT_MS);
  results.classList.add("is-busy");
  try {
    const answer = await fetch(address, { headers: { "X-Part": "results" }, signal: mine.signal });
    if (!answer.ok) { location.href = address; return; }
    const html = await answer.text();
    if (asking !== mine) return;
    const focused = document.activeElement;
    const key = focused && (focused.dataset.key || focused.id);
    results.innerHTML = html;
    if (!keepsHistory) history.pushState(null, "", address);
    prepareList();
    const again = key && all("[data-key], [id]", results).find((one) => (one.dataset.key || one.id) === key);
    if (again) again.focus({ preventScroll: true });
    performance.mark("narrowed");
  } catch (error) {
    if (asking === mine) location.href = address;
  } finally {
    clearTimeout(timer);
    if (asking === mine) { asking = null; results.classList.remove("is-busy"); }
  }
}

function prepareList() {
  for (const facet of all("details.facet", results)) {
    if (folded.has(facet.dataset.facet)) facet.open = folded.get(facet.dataset.facet);
  }
  showFilters(areFiltersOpen);
  const head = find(".head", results);
  if (head) Object.assign(document.body.dataset, { generation: head.dataset.generation, known: head.dataset.known });
  find("#newer").hidden = true;
}

function showFilters(isOpen) {
  areFiltersOpen = isOpen;
  const button = find(".filters-toggle");
  if (!button) return;
  button.setAttribute("aria-expanded", String(isOpen));
  find("#facets").classList.toggle("is-open", isOpen);
  results.classList.toggle("has-filters", isOpen);
}

function addressOf(form) {
  const pairs = [...new FormData(form)].filter(([, value]) => value !== "");
  const query = new URLSearchParams(pairs.filter(([name, value]) => !(name === "sort" && value === "newest")));
  return `/episodes${query.size ? `?${query}` : ""}`;
}

if (results) {
  results.addEventListener("click", (event) => {
    if (event.target.closest(".filters-toggle")) { showFilters(!areFiltersOpen); return; }
    const link = event.target.closest("a[data-narrow]");
    if (!link || !isPlain(event)) return;
    event.preventDefault();
    narrow(link.getAttribute("href"));
  });
  results.addEventListener("submit", (event) => {
    const form = event.target.closest("form[data-narrow]");
    if (!form) return;
    event.preventDefault();
    narrow(addressOf(form));
  });
  results.addEventListener("change", (event) => {
    if (event.target.id === "sort") event.target.form.requestSubmit();
  });
  results.addEventListener("toggle", (event) => {
    if (event.target.matches("details.facet")) folded.set(event.target.dataset.facet, event.target.open);
  }, true);
  window.addEventListener("popstate", () => narrow(location.pathname + location.search, { keepsHistory: true }));
}

function moveInList(by) {
  const links = all(".row-link");
  if (!links.length) return;
  const at = links.indexOf(document.activeElement);
  const next = links[at < 0 ? (by > 0 ? 0 : links.length - 1) : Math.min(Math.max(at + by, 0), links.length - 1)];
  next.focus();
  next.scrollIntoView({ block: "nearest" });
}

// Steps --------------------------------------------------------------------------------------------------------------
const scrubber = find("[data-scrubber]");
const players = all("[data-player]").map((element) => ({
  element, steps: all(".step", element), lane: element.closest(".lane"), tokens: null, areTokensShown: false,
}));
let current = 0, count = 0;

function goTo(step) {
  current = Math.min(Math.max(step, 0), count - 1);
  for (const player of players) showStep(player);
  find("[data-slider]").value = current + 1;
  find("[data-position]").textContent = `step ${current + 1} of ${count}`;
  all(".tick").forEach((tick, index) => {
    if (index === current) { tick.setAttribute("aria-current", "step"); tick.scrollIntoView({ block: "nearest", inline: "nearest" }); }
    else tick.removeAttribute("aria-current");
  });
  const address = new URL(location.href);
  if (current) address.searchParams.set("step", current + 1); else address.searchParams.delete("step");
  history.replaceState(null, "", address);
  find('[data-go="before"]').href = `?step=${Math.max(current, 1)}`;
  find('[data-go="after"]').href = `?step=${Math.min(current + 2, count)}`;
}

function showStep(player) {
  if (!player.steps.length) return;
  const mine = Math.min(current, player.steps.length - 1);
  player.steps.forEach((step, index) => {
    if (step.hidden !== (index !== mine)) step.hidden = index !== mine;
    if (Math.abs(index - mine) <= AHEAD) load(step);
  });
  if (player.lane) {
    const isOver = current >= player.steps.length;
    player.lane.classList.toggle("is-over", isOver);
    find("[data-ended]", player.lane).hidden = !isOver;
  }
}

function load(step) {
  const image = find("img", step);
  if (!image || image.loading === "eager") return;
  image.loading = "eager";
  image.decode().catch(() => {});
}

document.addEventListener("error", (event) => {
  if (!(event.target instanceof HTMLImageElement)) return;
  const note = document.createElement("p");
  note.className = "missing";
  note.textContent = "This screenshot could not be loaded: it may have been removed from the store.";
  event.target.closest(".shot").replaceChildren(note);
}, true);

async function ask(address) {
  const answer = await fetch(address, { signal: AbortSignal.timeout(LIMIT_MS) });
  if (answer.ok) return answer;
  let message = `the viewer answered ${answer.status}`;
  try { message = (await answer.json()).error || message; } catch (error) { /* no JSON: the status is shown */ }
  throw new Error(message);
}

async function showTokens(player) {
  player.areTokensShown = !player.areTokensShown;
  all("[data-tokens-toggle]", player.element).forEach((button) => button.setAttribute("aria-pressed", String(player.areTokensShown)));
  const notes = all("[data-tokens-note]", player.element);
  try {
    if (player.areTokensShown && !player.tokens) {
      const answer = await ask(`/tokens/${encodeURIComponent(player.element.dataset.episode)}`);
      player.tokens = await answer.json();
    }
  } catch (error) {
    notes.forEach((note) => { note.hidden = false; note.textContent = error.message; });
    return;
  }
  all("[data-response]", player.element).forEach((response, index) => {
    response.dataset.said = response.dataset.said ?? response.textContent;
    const tokens = player.tokens && player.tokens[index];
    if (player.areTokensShown && tokens) {
      response.replaceChildren(...tokens.map(([text, logprob]) => {
        const shown = document.createElement("span");
        shown.className = `tok tok${surprise(logprob)}`;
        shown.textContent = text;
        shown.title = `probability ${(100 * Math.exp(logprob)).toPrecision(3)}%, ${logprob.toFixed(2)} nats`;
        return shown;
      }));
    } else {
      response.textContent = response.dataset.said;
    }
  });
  notes.forEach((note) => {
    note.hidden = !player.areTokensShown;
    note.textContent = "The redder, the less likely the token was: under 90%, 50%, 10%, 1%. Point at a token to see its probability.";
  });
}

function surprise(logprob) {
  const probability = Math.exp(logprob);
  return probability >= 0.9 ? 0 : probability >= 0.5 ? 1 : probability >= 0.1 ? 2 : probability >= 0.01 ? 3 : 4;
}

if (scrubber && players.length) {
  count = Number(scrubber.dataset.count);
  current = Number(find("[data-slider]").value) - 1;
  scrubber.addEventListener("click", (event) => {
    const go = event.target.closest("[data-go]");
    if (!go || !isPlain(event)) return;
    event.preventDefault();
    goTo({ before: current - 1, after: current + 1 }[go.dataset.go] ?? Number(go.dataset.go));
  });
  find("[data-slider]").addEventListener("input", (event) => goTo(Number(event.target.value) - 1));
  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-tokens-toggle]")) showTokens(players.find((one) => one.element.contains(event.target)));
  });
  document.addEventListener("toggle", async (event) => {
    const details = event.target;
    if (!details.dataset || !details.dataset.observation || !details.open) return;
    const address = details.dataset.observation;
    delete details.dataset.observation;
    try { find("pre", details).textContent = await (await ask(address)).text() || "nothing"; }
    catch (error) { find("pre", details).textContent = error.message; details.dataset.observation = address; }
  }, true);
  for (const player of players) showStep(player);
}

// Keys ---------------------------------------------------------------------------------------------------------------
const keys = {
  ArrowLeft: () => count && goTo(current - 1),
  ArrowRight: () => count && goTo(current + 1),
  Home: () => count && goTo(0),
  End: () => count && goTo(count - 1),
  "[": () => follow("[data-before-episode]"),
  "]": () => follow("[data-after-episode]"),
  u: () => follow("[data-up]"),
  j: () => moveInList(1),
  k: () => moveInList(-1),
  m: () => document.body.classList.toggle("no-marks"),
  t: () => players.forEach(showTokens),
  "/": () => (find("#q") ? find("#q").focus() : location.assign("/episodes")),
  "?": () => find("#keys").showModal(),
};
const NEED_STEPS = new Set(["ArrowLeft", "ArrowRight", "Home", "End"]);

function follow(selector) {
  const link = find(selector);
  if (link) location.assign(link.href);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (event.target.closest("input, select, textarea, dialog")) return;
  const act = Object.hasOwn(keys, event.key) ? keys[event.key] : null;
  if (!act || (NEED_STEPS.has(event.key) && !count)) return;
  event.preventDefault();
  act();
});
const showKeys = find("#show-keys");
if (showKeys) showKeys.addEventListener("click", keys["?"]);

// Newer episodes -----------------------------------------------------------------------------------------------------
let poll = 0;

async function lookForNewer() {
  clearTimeout(poll);
  if (document.hidden) return;
  try {
    const found = await (await ask("/newer")).json();
    const more = found.num_episodes - Number(document.body.dataset.known);
    const box = find("#newer");
    if (String(found.generation) !== document.body.dataset.generation && more !== 0) {
      const link = document.createElement("a");
      link.href = location.href;
      link.textContent = "show them";
      const text = more > 0 ? `${more.toLocaleString("en")} newer episode${more === 1 ? "" : "s"} in the store: ` : "The store has changed: ";
      if (box.dataset.text !== text) {
        box.dataset.text = text;
        box.replaceChildren(text, link);
        link.addEventListener("click", (event) => { event.preventDefault(); if (results) narrow(location.pathname + location.search, { keepsHistory: true }); else location.reload(); });
      }
      box.hidden = false;
    }
  } catch (error) { /* retried: the viewer may be restarting */ }
  poll = setTimeout(lookForNewer, POLL_MS);
}

if (results || document.querySelector(".tiles") || document.body.dataset.known === "0") {
  poll = setTimeout(lookForNewer, POLL_MS);
  document.addEventListener("visibilitychange", lookForNewer);
}
