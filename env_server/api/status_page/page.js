"use strict";
// Requests the figures once a second while the tab is visible, and the pictures of the cards in view when they
// have changed. Text of a task, a model or a client is set as text, never as markup.
const REFRESH_MS = 1000, LIMIT_MS = 10000, RETRY_MS = 2000, MAX_FETCHES = 4, SMALL = 480, LARGE = 1280;
const STATES = ["starting", "warm", "leased", "resetting", "failed"];
const OUTCOMES = ["evaluated", "closed", "idle", "client_gone", "shutdown", "env_fault", "grader_fault"];
const KEY = "env-server-token";
const byId = (id) => document.getElementById(id);
const cards = new Map();
const inView = new Set();
let token = sessionStorage.getItem(KEY) || "";
let onlyState = null, numFetching = 0, timer = 0, isAsking = false, lastAnswerAt = null, zoomed = null, zoomVersion = null;

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  if (seconds < 90) return `${seconds} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

async function ask(path) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
  if (answer.status === 401) throw new RefusedError();
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer;
}

class RefusedError extends Error {}

function describe(list, rows) {
  while (list.children.length > rows.length) list.lastChild.remove();
  rows.forEach(([name, value], index) => {
    let row = list.children[index];
    if (!row) {
      row = document.createElement("div");
      row.append(document.createElement("dt"), document.createElement("dd"));
      list.append(row);
    }
    setText(row.firstChild, name);
    setText(row.lastChild, String(value));
    row.classList.toggle("bad", name.endsWith("fault") && value > 0);
  });
}

function showServer(data) {
  const server = data.server;
  byId("condition").className = `badge ${server.is_draining ? "draining" : "ok"}`;
  setText(byId("condition"), server.is_draining ? "draining" : "serving");
  describe(byId("about"), [
    ["provider", server.provider],
    ["screen", server.screen],
    ["image", server.image_digest],
    ["grader", server.grader_version],
    ["version", server.version],
    ["up", duration(server.uptime_s)],
    ...(server.details ? [["each desktop", server.details]] : []),
  ]);
  describe(byId("totals"), [
    ["live", data.num_live], ["waiting for a replica", data.num_waiting], ["opened", data.num_opened],
    ...OUTCOMES.map((name) => [name.replace("_", " "), data.outcomes[name] || 0]),
  ]);
}

function showStates(replicas) {
  const counts = Object.fromEntries(STATES.map((state) => [state, 0]));
  for (const replica of replicas) counts[replica.state] = (counts[replica.state] || 0) + 1;
  const group = byId("states");
  if (!group.children.length) {
    for (const state of [null, ...STATES]) {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.state = state || "";
      const number = document.createElement("b");
      button.append(number, ` ${state || "all"}`);
      button.addEventListener("click", () => { onlyState = state; filterCards(); });
      group.append(button);
    }
    filterCards();
  }
  for (const button of group.children) {
    setText(button.firstChild, String(button.dataset.state ? counts[button.dataset.state] : replicas.length));
  }
}

function filterCards() {
  let numShown = 0;
  for (const card of cards.values()) {
    card.element.hidden = onlyState !== null && card.replica.state !== onlyState;
    numShown += !card.element.hidden;
  }
  byId("none").hidden = numShown > 0 || !cards.size;
  for (const button of byId("states").children) {
    button.setAttribute("aria-pressed", String(button.dataset.state === (onlyState || "")));
  }
}

function makeCard(id) {
  const element = byId("card").content.firstElementChild.cloneNode(true);
  const find = (selector) => element.querySelector(selector);
  const card = {
    id, element, replica: null, image: find("img"), noPicture: find(".no-picture"), button: find(".picture"),
    state: find(".state"), task: find(".task"), who: find(".who"), past: find(".past"), error: find(".error"),
    version: null, isFetching: false, isZooming: false, fetchedAt: 0, retryAt: 0,
  };
  setText(find("h3"), id);
  element.dataset.replica = id;
  card.button.addEventListener("click", () => openZoom(card));
  cards.set(id, card);
  byId("cards").append(element);
  observer.observe(element);
  return card;
}

function showReplica(replica) {
  const card = cards.get(replica.id) || makeCard(replica.id);
  card.replica = replica;
  const episode = replica.episode;
  card.state.className = `badge state ${replica.state}`;
  setText(card.state, `${replica.state} ${duration(replica.since_s)}`);
  setText(card.task, episode ? `${episode.task_id}: ${episode.instruction}` : "");
  card.task.title = episode ? episode.instruction : "";
  setText(card.who, episode
    ? `step ${episode.num_steps}${episode.is_busy ? ", working" : ""} · ${episode.client_id || "unnamed client"}` : "");
  const failures = replica.num_failures ? `, ${counted(replica.num_failures, "failure")}` : "";
  setText(card.past, `${counted(replica.num_served, "episode")} served${failures}`);
  setText(card.error, replica.last_error ? `last: ${replica.last_error}` : "");
  card.error.title = replica.last_error || "";
  const what = episode ? `task ${episode.task_id}, after step ${episode.num_steps}` : replica.state;
  card.image.alt = `Screen of ${replica.id}: ${what}`;
  card.button.setAttribute("aria-label", `Enlarge the screen of ${replica.id}`);
  card.button.disabled = replica.picture === null;
  if (replica.picture === null) dropPicture(card);
  setText(card.noPicture, replica.picture === null ? "no picture" : "loading");
}

function dropPicture(card) {
  card.version = null;
  card.image.hidden = true;
  card.noPicture.hidden = false;
}

function fetchPictures() {
  if (document.hidden || numFetching >= MAX_FETCHES) return;
  const now = performance.now();
  const wanted = [...cards.values()].filter((card) => card.replica && !card.isFetching && inView.has(card.element)
    && card.replica.picture !== null && card.replica.picture !== card.version && now >= card.retryAt);
  wanted.sort((one, other) => one.fetchedAt - other.fetchedAt);
  wanted.slice(0, MAX_FETCHES - numFetching).forEach(fetchPicture);
}

async function fetchPicture(card) {
  const version = card.replica.picture;
  card.isFetching = true;
  card.fetchedAt = performance.now();
  numFetching += 1;
  try {
    const blob = await loadPicture(card.id, SMALL);
    if (!blob) {
      card.retryAt = performance.now() + RETRY_MS;
    } else if (card.replica.picture !== null) {
      card.version = version;
      setImage(card.image, blob);
      card.image.hidden = false;
      card.noPicture.hidden = true;
    }
  } catch (error) {
    setText(card.noPicture, "the picture could not be loaded");
    card.retryAt = performance.now() + RETRY_MS;
  } finally {
    card.isFetching = false;
    numFetching -= 1;
  }
  fetchPictures();
}

async function loadPicture(id, width) {
  const answer = await ask(`status/replicas/${encodeURIComponent(id)}/picture?width=${width}`);
  return answer.status === 204 ? null : answer.blob();
}

function setImage(image, blob) {
  const old = image.src;
  image.src = URL.createObjectURL(blob);
  if (old.startsWith("blob:")) URL.revokeObjectURL(old);
}

function openZoom(card) {
  zoomed = card;
  zoomVersion = null;
  byId("zoom-image").removeAttribute("src");
  byId("zoom").showModal();
  refreshZoom();
}

async function refreshZoom() {
  if (!zoomed || zoomed.isZooming) return;
  setText(byId("zoom-title"), `${zoomed.id}, ${zoomed.replica.state}`);
  byId("zoom-image").alt = zoomed.image.alt;
  const card = zoomed, version = card.replica.picture;
  if (version === null || version === zoomVersion) return;
  card.isZooming = true;
  try {
    const blob = await loadPicture(card.id, LARGE);
    if (blob && zoomed === card) {
      setImage(byId("zoom-image"), blob);
      zoomVersion = version;
    }
  } catch (error) {
    setText(byId("zoom-title"), `${card.id}: the picture could not be loaded`);
  } finally {
    card.isZooming = false;
  }
}

function showTokenForm(problem) {
  byId("token-form").hidden = false;
  byId("board").hidden = true;
  setText(byId("token-error"), problem);
  byId("condition").className = "badge";
  setText(byId("condition"), "locked");
  byId("token").focus();
}

function show(data) {
  byId("token-form").hidden = true;
  byId("board").hidden = false;
  showServer(data);
  showStates(data.replicas);
  const ids = new Set(data.replicas.map((replica) => replica.id));
  for (const [id, card] of cards) {
    if (!ids.has(id)) { card.element.remove(); inView.delete(card.element); cards.delete(id); }
  }
  data.replicas.forEach(showReplica);
  filterCards();
  fetchPictures();
  refreshZoom();
}

async function refresh() {
  clearTimeout(timer);
  if (document.hidden || isAsking) return;
  isAsking = true;
  try {
    show(await (await ask("status.json")).json());
    lastAnswerAt = new Date();
  } catch (error) {
    if (error instanceof RefusedError) {
      sessionStorage.removeItem(KEY);
      token = "";
      showTokenForm("The server refused this token.");
      return;
    }
    byId("condition").className = "badge lost";
    setText(byId("condition"), lastAnswerAt ? `no answer since ${lastAnswerAt.toLocaleTimeString()}` : "no answer");
  } finally {
    isAsking = false;
  }
  timer = setTimeout(refresh, REFRESH_MS);
}

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) inView.add(entry.target); else inView.delete(entry.target);
  }
  fetchPictures();
}, { rootMargin: "100px" });

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem(KEY, token);
  byId("token").value = "";
  setText(byId("token-error"), "");
  refresh();
});
byId("zoom").addEventListener("close", () => { zoomed = null; });
document.addEventListener("visibilitychange", refresh);
if (document.body.dataset.needsToken === "true" && !token) showTokenForm(""); else refresh();
