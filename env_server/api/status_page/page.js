"use strict";
// Requests the figures once a second while the tab is visible, a stream of the screens in view, and single pictures of
// desktops that have no stream. Text of a task, a model or a client is set as text, never as markup.
const REFRESH_MS = 1000, LIMIT_MS = 10000, RETRY_MS = 2000, MAX_FETCHES = 4, SMALL = 480, LARGE = 1280;
const RESTART_MS = 300;
const STATES = ["starting", "warm", "leased", "resetting", "failed"];
const OUTCOMES = ["evaluated", "closed", "idle", "client_gone", "shutdown", "env_fault", "grader_fault", "tampering", "touched"];
const KEY = "env-server-token";
const byId = (id) => document.getElementById(id);
const cards = new Map();
const inView = new Set();
let token = sessionStorage.getItem(KEY) || "";
const grid = { ids: "", stop: null, width: SMALL }, closeUp = { ids: "", stop: null, width: LARGE };
let onlyState = null, numFetching = 0, timer = 0, isAsking = false, lastAnswerAt = null, zoomed = null, zoomVersion = null, isZoomLive = false, screenSize = [1, 1], viewerUrl = "";

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
  viewerUrl = server.viewer_url;
  screenSize = server.screen.split("x").map(Number);
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
    screen: find(".screen"), state: find(".state"), task: find(".task"), who: find(".who"), action: find(".action"),
    note: find(".note"), past: find(".past"), record: find(".record"), error: find(".error"), marked: "", isLive: false, version: null, isFetching: false, isZooming: false, fetchedAt: 0, retryAt: 0,
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
    ? `step ${episode.num_steps}${episode.is_busy ? ", working" : ""}${personWords(episode)} · ${episode.client_id || "unnamed client"}` : "");
  card.who.title = episode ? episode.client_id : "";
  setText(card.action, episode ? episode.action : "");
  setText(card.note, episode ? episode.note : "");
  card.note.title = episode ? episode.note : "";
  markPoints(card);
  const failures = replica.num_failures ? `, ${counted(replica.num_failures, "failure")}` : "";
  setText(card.past, `${counted(replica.num_served, "episode")} served${failures}${lastWords(replica.last)}`);
  showRecord(card.record, episode || replica.last);
  setText(card.error, replica.last_error ? `last: ${replica.last_error}` : "");
  card.error.title = replica.last_error || "";
  const what = episode ? `task ${episode.task_id}, after step ${episode.num_steps}` : replica.state;
  card.image.alt = `Screen of ${replica.id}: ${what}`;
  card.button.setAttribute("aria-label", `Enlarge the screen of ${replica.id}`);
  card.button.disabled = replica.picture === null;
  if (replica.picture === null) dropPicture(card);
  setText(card.noPicture, replica.picture === null ? "no picture" : "loading");
}

// The stored episode: a link where the viewer's address is known, else its id to copy.
function showRecord(element, episode) {
  const id = (episode && episode.record_id) || "";
  if (element.dataset.record === `${viewerUrl} ${id}`) return;
  element.dataset.record = `${viewerUrl} ${id}`;
  element.replaceChildren();
  if (!id) return;
  const name = document.createElement(viewerUrl ? "a" : "code");
  name.textContent = id;
  if (viewerUrl) Object.assign(name, { href: `${viewerUrl}/episode/${encodeURIComponent(id)}`, target: "_blank", rel: "noopener", title: "In the viewer, once the episode is stored" });
  element.title = id;
  element.append("episode ", name);
}

function personWords(episode) {
  if (episode.is_demonstration) return " · demonstration";
  return episode.num_person_inputs ? ` · touched by a person (${counted(episode.num_person_inputs, "input")})` : "";
}

function lastWords(last) {
  if (!last) return "";
  const reward = last.reward === null ? last.outcome.replace("_", " ") : `reward ${last.reward}`;
  return `; last: ${reward} after ${counted(last.num_steps, "step")}`;
}

// A ring where the last action clicked, once for each step.
function markPoints(card) {
  const episode = card.replica.episode;
  const step = episode ? `${episode.id}-${episode.num_steps}` : "";
  if (card.marked === step) return;
  card.marked = step;
  for (const screen of [card.screen, ...(zoomed === card ? [byId("zoom-screen")] : [])]) {
    screen.querySelectorAll(".mark").forEach((mark) => mark.remove());
    for (const [x, y] of episode ? episode.points : []) {
      const mark = document.createElement("span");
      mark.className = "mark";
      mark.style.left = `${100 * x / screenSize[0]}%`;
      mark.style.top = `${100 * y / screenSize[1]}%`;
      screen.append(mark);
    }
  }
}

// Reads the stream of the replicas in view; it is opened again when others come into view, and when it ends.
function watch(view, ids) {
  const wanted = document.hidden ? "" : ids.join(" ");
  if (view.ids === wanted) return;
  view.ids = wanted;
  if (view.stop) view.stop.abort();
  endLive(view);
  if (!wanted) return;
  view.stop = new AbortController();
  readStream(view, ids, view.stop.signal).catch(() => {}).finally(() => {
    if (view.ids === wanted) endLive(view);
    if (view.ids === wanted) setTimeout(() => { if (view.ids === wanted) view.ids = ""; }, RETRY_MS);
  });
}

// Without a stream the cards show single pictures again. While it lasts it has the newest screen, also of a still one.
function endLive(view) {
  if (view === closeUp) isZoomLive = false;
  else for (const card of cards.values()) card.isLive = false;
}

async function readStream(view, ids, signal) {
  const query = ids.map((id) => `replica=${encodeURIComponent(id)}`).join("&");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  await new Promise((resolve) => setTimeout(resolve, RESTART_MS));
  if (signal.aborted) return;
  const answer = await fetch(`status/live?width=${view.width}&${query}`, { headers, cache: "no-store", signal });
  if (!answer.ok) return;
  const reader = answer.body.getReader();
  let held = new Uint8Array(0);
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const joined = new Uint8Array(held.length + value.length);
    joined.set(held);
    joined.set(value, held.length);
    held = takeFrames(view, joined);
  }
}

// Shows the whole records at the start of the bytes, and returns the rest.
function takeFrames(view, bytes) {
  let at = 0;
  while (bytes.length - at >= 4) {
    const headSize = new DataView(bytes.buffer, bytes.byteOffset + at).getUint32(0);
    if (bytes.length - at < 4 + headSize) break;
    const head = JSON.parse(new TextDecoder().decode(bytes.subarray(at + 4, at + 4 + headSize)));
    const start = at + 4 + headSize;
    if (bytes.length - start < head.size) break;
    showFrame(view, head.replica, new Blob([bytes.slice(start, start + head.size)], { type: "image/jpeg" }));
    at = start + head.size;
  }
  return bytes.slice(at);
}

function showFrame(view, id, blob) {
  const card = cards.get(id);
  if (!card || !card.replica || card.replica.picture === null) return;
  if (view === closeUp) {
    if (zoomed !== card) return;
    setImage(byId("zoom-image"), blob);
    isZoomLive = true;
    return;
  }
  card.isLive = true;
  setImage(card.image, blob);
  card.image.hidden = false;
  card.noPicture.hidden = true;
}

function watchScreens() {
  const shown = [...cards.values()].filter((card) => inView.has(card.element) && !card.element.hidden);
  watch(grid, byId("board").hidden ? [] : shown.map((card) => card.id).sort());
  watch(closeUp, zoomed ? [zoomed.id] : []);
}

// Also the end of its live picture: a frame of the next desktop may come before the figures that name that desktop.
function dropPicture(card) {
  card.version = null;
  card.isLive = false;
  if (zoomed === card) isZoomLive = false;
  card.image.hidden = true;
  card.noPicture.hidden = false;
}

function fetchPictures() {
  if (document.hidden || numFetching >= MAX_FETCHES) return;
  const now = performance.now();
  const wanted = [...cards.values()].filter((card) => card.replica && !card.isFetching && inView.has(card.element)
    && card.replica.picture !== null && card.replica.picture !== card.version && now >= card.retryAt
    && !card.isLive);
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
  isZoomLive = false;
  byId("zoom-screen").querySelectorAll(".mark").forEach((mark) => mark.remove());
  byId("zoom-image").removeAttribute("src");
  byId("zoom").showModal();
  refreshZoom();
  watchScreens();
}

async function refreshZoom() {
  if (!zoomed || zoomed.isZooming) return;
  const episode = zoomed.replica.episode;
  const step = episode ? `, step ${episode.num_steps}` : "";
  const reward = episode && episode.reward !== null ? `, reward ${episode.reward}` : "";
  setText(byId("zoom-title"), `${zoomed.id}, ${zoomed.replica.state}${step}${reward}`);
  setText(byId("zoom-task"), episode ? `${episode.task_id}: ${episode.instruction}` : "");
  setText(byId("zoom-action"), episode ? episode.action : "");
  setText(byId("zoom-note"), episode ? episode.note : "");
  showRecord(byId("zoom-record"), episode || zoomed.replica.last);
  byId("zoom-image").alt = zoomed.image.alt;
  const card = zoomed, version = card.replica.picture;
  if (version === null || version === zoomVersion || isZoomLive) return;
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
  showPerson(data.server);
  filterCards();
  fetchPictures();
  refreshZoom();
  watchScreens();
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
  watchScreens();
}, { rootMargin: "100px" });

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem(KEY, token);
  byId("token").value = "";
  setText(byId("token-error"), "");
  refresh();
});
byId("zoom").addEventListener("close", () => { zoomed = null; watchScreens(); });
document.addEventListener("visibilitychange", () => { watchScreens(); refresh(); });
if (document.body.dataset.needsToken === "true" && !token) showTokenForm(""); else refresh();
