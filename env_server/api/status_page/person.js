// Mouse and keyboard of a person for the enlarged desktop. Every input is one action, sent in order, one at a time, to
// the episode that was shown when the person took the mouse: never to the next one on that desktop.
const INPUT_LIMIT_MS = 120000, GATHER_MS = 400, CLICK_MS = 250, WHEEL_MS = 150, DRAG_PX = 5, WHEEL_STEP = 100, MAX_WHEEL = 20;
const CLICKS = { 1: "click", 2: "doubleClick", 3: "tripleClick" };
const KEYS = {
  Enter: "enter", Backspace: "backspace", Delete: "delete", Tab: "tab", Escape: "esc", ArrowLeft: "left",
  ArrowRight: "right", ArrowUp: "up", ArrowDown: "down", Home: "home", End: "end", PageUp: "pageup",
  PageDown: "pagedown", Insert: "insert", ...Object.fromEntries([...Array(12)].map((_, i) => [`F${i + 1}`, `f${i + 1}`])),
};
const person = {
  episode: null, waiting: [], isSending: false, typed: "", typing: 0, clicks: null, clicking: 0, wheel: 0, wheeling: 0,
  pressed: null, wanted: new URLSearchParams(location.hash.slice(1)).get("episode"),
};

const zoomedEpisode = () => (zoomed && zoomed.replica.episode) || null;

// Called after each refresh.
function showPerson(server) {
  openWanted();
  const episode = zoomedEpisode();
  if (person.episode && (!episode || episode.id !== person.episode)) takeMouse(false);
  byId("person").hidden = !episode || !server.allows_takeover;
  if (!episode) return;
  const isDemonstration = episode.is_demonstration, isOn = person.episode !== null;
  byId("take").setAttribute("aria-pressed", String(isOn));
  setText(byId("take"), isOn ? "Release the mouse" : "Take the mouse");
  byId("end-buttons").hidden = !isDemonstration || episode.reward !== null;
  setText(byId("person-mark"), markOf(episode));
}

function markOf(episode) {
  if (episode.is_demonstration) {
    if (episode.reward !== null) return `The demonstration is graded: reward ${episode.reward}.`;
    return `A demonstration: each of your inputs becomes a step (${episode.num_steps} so far).`;
  }
  if (!episode.num_person_inputs) return "Your first input marks this episode as touched: it counts neither in training nor in a score.";
  return `Touched: a person sent ${counted(episode.num_person_inputs, "input")}. The episode counts neither in training nor in a score.`;
}

// The address may name an episode: its desktop is enlarged once it is shown.
function openWanted() {
  if (!person.wanted) return;
  for (const card of cards.values()) {
    const episode = card.replica && card.replica.episode;
    if (!episode || episode.id !== person.wanted) continue;
    person.wanted = null;
    openZoom(card);
    if (episode.is_demonstration) takeMouse(true);
  }
}

function takeMouse(isOn) {
  const episode = isOn ? zoomedEpisode() : null;
  person.episode = episode && episode.id;
  Object.assign(person, { waiting: [], typed: "", clicks: null, wheel: 0, pressed: null });
  [person.typing, person.clicking, person.wheeling].forEach(clearTimeout);
  byId("zoom-screen").classList.toggle("taken", person.episode !== null);
  setText(byId("person-problem"), "");
  if (person.episode) byId("zoom-screen").focus();
}

// A string of pyautogui's language, which is Python's: JSON's escapes are a part of it.
function literal(text) {
  return JSON.stringify(text).replace(/[\u0085\u2028\u2029]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function send(action) {
  if (!person.episode) return;
  person.waiting.push(action);
  sendWaiting();
}

async function sendWaiting() {
  if (person.isSending) return;
  person.isSending = true;
  while (person.episode && person.waiting.length) {
    setText(byId("person-state"), `sending ${counted(person.waiting.length, "input")}`);
    const problem = await post(person.episode, person.waiting.shift());
    setText(byId("person-problem"), problem);
    if (problem) person.waiting = [];
  }
  setText(byId("person-state"), "");
  person.isSending = false;
  refresh();
}

// A sentence if the input was refused or lost, else nothing.
async function post(episode, action) {
  const headers = { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const address = `v1/episodes/${encodeURIComponent(episode)}/person/inputs`;
  try {
    const body = JSON.stringify({ action });
    const answer = await fetch(address, { method: "POST", headers, body, signal: AbortSignal.timeout(INPUT_LIMIT_MS) });
    return answer.ok ? "" : (await answer.json()).error;
  } catch (error) {
    return "The server did not answer: the input may be lost.";
  }
}

function pointOf(event) {
  const box = byId("zoom-image").getBoundingClientRect(), [width, height] = zoomed.server.screenSize;
  const at = (value, start, size, pixels) => Math.max(0, Math.min(pixels - 1, Math.floor(((value - start) / size) * pixels)));
  return [at(event.clientX, box.left, box.width, width), at(event.clientY, box.top, box.height, height)];
}

// What was gathered is sent before any other kind of input, so that the order stays that of the person.
function sendGathered() {
  sendTyped();
  sendClicks();
  sendWheel();
}

function sendTyped() {
  clearTimeout(person.typing);
  const text = person.typed;
  person.typed = "";
  if (text) send(`pyautogui.write(${literal(text)})`);
}

function sendClicks() {
  clearTimeout(person.clicking);
  const clicks = person.clicks;
  person.clicks = null;
  if (clicks) send(`pyautogui.${CLICKS[Math.min(3, clicks.count)]}(${clicks.point.join(", ")})`);
}

function sendWheel() {
  clearTimeout(person.wheeling);
  const { wheel, wheelPoint } = person;
  person.wheel = 0;
  const amount = Math.min(MAX_WHEEL, Math.max(1, Math.round(Math.abs(wheel) / WHEEL_STEP)));
  if (wheel) send(`pyautogui.moveTo(${wheelPoint.join(", ")})\npyautogui.scroll(${wheel > 0 ? -amount : amount})`);
}

function onPress(event) {
  if (!person.episode) return;
  event.preventDefault();
  byId("zoom-screen").focus();
  person.pressed = { button: event.button, point: pointOf(event), at: [event.clientX, event.clientY] };
}

function onRelease(event) {
  const pressed = person.pressed;
  person.pressed = null;
  if (!person.episode || !pressed || pressed.button !== event.button) return;
  event.preventDefault();
  const isDrag = Math.hypot(event.clientX - pressed.at[0], event.clientY - pressed.at[1]) > DRAG_PX;
  if (event.button === 0 && !isDrag) {
    sendTyped();
    sendWheel();
    if (person.clicks && event.detail === 1) sendClicks();
    person.clicks = { count: Math.max(1, event.detail), point: pressed.point };
    clearTimeout(person.clicking);
    person.clicking = setTimeout(sendClicks, CLICK_MS);
    return;
  }
  sendGathered();
  const start = pressed.point.join(", ");
  if (event.button === 0) send(`pyautogui.moveTo(${start})\npyautogui.dragTo(${pointOf(event).join(", ")})`);
  else if (event.button === 1) send(`pyautogui.middleClick(${start})`);
  else if (event.button === 2) send(`pyautogui.rightClick(${start})`);
}

function onWheel(event) {
  if (!person.episode) return;
  event.preventDefault();
  if (Math.sign(event.deltaY) !== Math.sign(person.wheel)) sendGathered();
  person.wheel += event.deltaY;
  person.wheelPoint = pointOf(event);
  clearTimeout(person.wheeling);
  person.wheeling = setTimeout(sendWheel, WHEEL_MS);
}

function onKey(event) {
  if (!person.episode || event.isComposing) return;
  if (event.key === "Escape" && event.shiftKey) {
    event.preventDefault();
    event.stopPropagation();
    takeMouse(false);
    byId("take").focus();
    return;
  }
  const isPrintable = [...event.key].length === 1;
  const key = isPrintable ? event.key : KEYS[event.key];
  if (!key) return;
  event.preventDefault();
  event.stopPropagation();
  const held = [["ctrl", event.ctrlKey], ["alt", event.altKey], ["win", event.metaKey]].filter(([, isHeld]) => isHeld);
  if (isPrintable && !held.length) {
    sendClicks();
    sendWheel();
    person.typed += key;
    clearTimeout(person.typing);
    person.typing = setTimeout(sendTyped, GATHER_MS);
    return;
  }
  sendGathered();
  const names = held.map(([name]) => name);
  if (event.shiftKey) names.push("shift");
  const all = [...names, isPrintable ? key.toLowerCase() : key].map(literal).join(", ");
  send(names.length ? `pyautogui.hotkey(${all})` : `pyautogui.press(${all})`);
}

function endDemonstration(action) {
  if (!person.episode) takeMouse(true);
  sendGathered();
  send(action);
}

byId("take").addEventListener("click", () => { takeMouse(person.episode === null); refresh(); });
byId("done").addEventListener("click", () => endDemonstration("DONE"));
byId("give-up").addEventListener("click", () => endDemonstration("FAIL"));
byId("zoom-screen").addEventListener("mousedown", onPress);
document.addEventListener("mouseup", onRelease);
byId("zoom-screen").addEventListener("contextmenu", (event) => { if (person.episode) event.preventDefault(); });
byId("zoom-screen").addEventListener("dragstart", (event) => event.preventDefault());
byId("zoom-screen").addEventListener("wheel", onWheel, { passive: false });
byId("zoom-screen").addEventListener("keydown", onKey);
byId("zoom").addEventListener("cancel", (event) => { if (person.episode) event.preventDefault(); });
byId("zoom").addEventListener("close", () => takeMouse(false));
