"use strict";
// Requests the figures once a second (less often with more than 100 desktops) while the tab is visible, a stream of the
// screens in view, and single pictures of desktops that have no stream. Text of a task, a model or a client is set as
// text, never as markup.
// The page that has the desktops defines `page`:
//   figures               the address of the figures
//   stream(ids, width)    the address of the stream of these cards, and pictureOf(card, width) that of one picture
//   headers()             of every request
//   refused()             the server requires a token, or another one
//   show(figures)         shows its own part and returns the desktops: { id, name, where, replica, server }, with
//                         server = { screenSize, isLost }; afterShow(figures) is called when they are shown
//   lost(lastAnswerAt)    there was no answer; lastAnswerAt is null before the first one
//   records(card)         the episodes to name: { word, id, address }, without an address as text
const REFRESH_MS = 1000, LIMIT_MS = 10000, RETRY_MS = 2000, MAX_FETCHES = 4, SMALL = 480, LARGE = 1280;
const RESTART_MS = 300, MS_PER_DESKTOP = 10;
const STATES = ["starting", "warm", "leased", "resetting", "failed"];
const byId = (id) => document.getElementById(id);
const cards = new Map();
const inView = new Set();
const grid = { ids: "", stop: null, width: SMALL }, closeUp = { ids: "", stop: null, width: LARGE };
let onlyState = null, numFetching = 0, numDesktops = 0, timer = 0, isAsking = false, lastAnswerAt = null, zoomed = null, zoomVersion = null, isZoomLive = false;

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
  const answer = await fetch(path, { headers: page.headers(), cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
  if (answer.status === 401) throw new RefusedError();
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer;
}

class RefusedError extends Error {}

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
    id, name: "", element, replica: null, server: null, title: find("h3"), where: find(".where"), image: find("img"), noPicture: find(".no-picture"), button: find(".picture"),
    screen: find(".screen"), state: find(".state"), task: find(".task"), who: find(".who"), action: find(".action"),
    note: find(".note"), past: find(".past"), record: find(".record"), error: find(".error"), marked: "", isLive: false, version: null, isFetching: false, isZooming: false, fetchedAt: 0, retryAt: 0,
  };
  element.dataset.replica = id;
  card.button.addEventListener("click", () => openZoom(card));
  cards.set(id, card);
  byId("cards").append(element);
  observer.observe(element);
  return card;
}

function showDesktop(desktop) {
  const { replica, server } = desktop;
  const card = cards.get(desktop.id) || makeCard(desktop.id);
  const name = desktop.where ? `${desktop.name} ${desktop.where}` : desktop.name;
  Object.assign(card, { name, replica, server });
  setText(card.title, desktop.name);
  setText(card.where, desktop.where || "");
  const episode = replica.episode;
  card.element.classList.toggle("lost", server.isLost);
  card.state.className = `badge state ${server.isLost ? "lost" : replica.state}`;
  setText(card.state, server.isLost ? "no answer" : `${replica.state} ${duration(replica.since_s)}`);
  setText(card.task, episode ? `${episode.task_id}: ${episode.instruction}` : "");
  card.task.title = episode ? episode.instruction : "";
  setText(card.who, episode
    ? `step ${episode.num_steps}${rewardWords(episode)}${episode.is_busy ? ", working" : ""}${personWords(episode)} · ${episode.client_id || "unnamed client"}` : "");
  card.who.title = episode ? episode.client_id : "";
  setText(card.action, episode ? episode.action : "");
  setText(card.note, episode ? episode.note : "");
  card.note.title = episode ? episode.note : "";
  markPoints(card);
  const failures = replica.num_failures ? `, ${counted(replica.num_failures, "failure")}` : "";
  setText(card.past, `${counted(replica.num_served, "episode")} served${failures}${lastWords(replica.last)}`);
  showRecords(card.record, card);
  setText(card.error, replica.last_error ? `last: ${replica.last_error}` : "");
  card.error.title = replica.last_error || "";
  const what = episode ? `task ${episode.task_id}, after step ${episode.num_steps}` : replica.state;
  card.image.alt = `Screen of ${name}: ${what}`;
  card.button.setAttribute("aria-label", `Enlarge the screen of ${name}`);
  card.button.disabled = replica.picture === null;
  if (replica.picture === null) dropPicture(card);
  setText(card.noPicture, replica.picture === null ? "no picture" : "loading");
}

const rewardWords = (episode) => (episode.reward === null ? "" : `, reward ${episode.reward}`);

// Stored episodes: a link where there is an address, else the id to copy.
function showRecords(element, card) {
  const records = page.records(card);
  const shown = JSON.stringify(records);
  if (element.dataset.records === shown) return;
  element.dataset.records = shown;
  element.title = records.map((record) => record.id).join("\n");
  element.replaceChildren(...records.map(({ word, id, address }) => {
    const line = document.createElement("span"), name = document.createElement(address ? "a" : "code");
    name.textContent = id;
    if (address) Object.assign(name, { href: address, target: "_blank", rel: "noopener" });
    line.append(`${word} `, name);
    return line;
  }));
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
    const [width, height] = card.server.screenSize;
    for (const [x, y] of episode ? episode.points : []) {
      const mark = document.createElement("span");
      mark.className = "mark";
      mark.style.left = `${100 * x / width}%`;
      mark.style.top = `${100 * y / height}%`;
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

// Without a stream the cards show single pictures again. While a stream lasts, the last frame of a desktop is its
// current screen, even if no further frame comes.
function endLive(view) {
  if (view === closeUp) isZoomLive = false;
  else for (const card of cards.values()) card.isLive = false;
}

async function readStream(view, ids, signal) {
  await new Promise((resolve) => setTimeout(resolve, RESTART_MS));
  if (signal.aborted) return;
  const answer = await fetch(page.stream(ids, view.width), { headers: page.headers(), cache: "no-store", signal });
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

// Also ends the live picture: a frame of the next desktop may come before the figures that name that desktop.
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
    const blob = await loadPicture(card, SMALL);
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

async function loadPicture(card, width) {
  const answer = await ask(page.pictureOf(card, width));
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
  const state = zoomed.server.isLost ? "no answer" : zoomed.replica.state;
  setText(byId("zoom-title"), `${zoomed.name}, ${state}${step}${episode ? rewardWords(episode) : ""}`);
  setText(byId("zoom-task"), episode ? `${episode.task_id}: ${episode.instruction}` : "");
  setText(byId("zoom-action"), episode ? episode.action : "");
  setText(byId("zoom-note"), episode ? episode.note : "");
  showRecords(byId("zoom-record"), zoomed);
  byId("zoom-image").alt = zoomed.image.alt;
  const card = zoomed, version = card.replica.picture;
  if (version === null || version === zoomVersion || isZoomLive) return;
  card.isZooming = true;
  try {
    const blob = await loadPicture(card, LARGE);
    if (blob && zoomed === card) {
      setImage(byId("zoom-image"), blob);
      zoomVersion = version;
    }
  } catch (error) {
    setText(byId("zoom-title"), `${card.name}: the picture could not be loaded`);
  } finally {
    card.isZooming = false;
  }
}

function show(data) {
  const desktops = page.show(data);
  numDesktops = desktops.length;
  showStates(desktops.map((desktop) => desktop.replica));
  const ids = new Set(desktops.map((desktop) => desktop.id));
  for (const card of [...cards.values()]) if (!ids.has(card.id)) removeCard(card);
  desktops.forEach(showDesktop);
  page.afterShow(data);
  filterCards();
  fetchPictures();
  refreshZoom();
  watchScreens();
}

function removeCard(card) {
  if (zoomed === card) byId("zoom").close();
  observer.unobserve(card.element);
  card.element.remove();
  inView.delete(card.element);
  cards.delete(card.id);
}

async function refresh() {
  clearTimeout(timer);
  if (document.hidden || isAsking) return;
  isAsking = true;
  try {
    show(await (await ask(page.figures)).json());
    lastAnswerAt = new Date();
  } catch (error) {
    if (error instanceof RefusedError) {
      page.refused();
      return;
    }
    page.lost(lastAnswerAt);
  } finally {
    isAsking = false;
  }
  timer = setTimeout(refresh, Math.max(REFRESH_MS, MS_PER_DESKTOP * numDesktops));
}

const observer = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) inView.add(entry.target); else inView.delete(entry.target);
  }
  fetchPictures();
  watchScreens();
}, { rootMargin: "100px" });

byId("zoom").addEventListener("close", () => { zoomed = null; watchScreens(); });
document.addEventListener("visibilitychange", () => { watchScreens(); refresh(); });
