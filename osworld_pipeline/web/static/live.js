// The viewer's own part of the live page: the env servers, and links to stored episodes.
const STREAM_DESKTOPS = 64;
const WORDS = { connecting: "connecting", serving: "serving", draining: "draining", lost: "no answer" };
const keyOf = (url, id) => `${url}#${id}`;
let stored = new Set();

const page = {
  figures: "/live/figures",
  stream: (ids, width) => `/live/screens?width=${width}&${ids.slice(0, STREAM_DESKTOPS).map((id) => `desktop=${encodeURIComponent(id)}`).join("&")}`,
  pictureOf: (card, width) => `/live/picture?width=${width}&desktop=${encodeURIComponent(card.id)}`,
  headers: () => ({}),
  refused() { location.reload(); },
  show(data) {
    stored = new Set(data.stored);
    showServers(data.servers, data.names);
    const areSeveral = data.servers.length > 1;
    const desktops = data.servers.filter((server) => server.status).flatMap((server) => desktopsOf(server, areSeveral));
    byId("board").hidden = !desktops.length;
    byId("no-servers").hidden = data.servers.length + data.names.length > 0;
    return desktops;
  },
  afterShow() {},
  lost(lastAnswerAt) {
    showCondition("lost", lastAnswerAt ? `the viewer has not answered since ${lastAnswerAt.toLocaleTimeString()}` : "the viewer does not answer");
  },
  records({ replica }) {
    const found = [["episode", replica.episode], ["last episode", replica.last]];
    return found.filter(([, episode]) => episode && episode.record_id).map(([word, { record_id: id }]) => (
      { word, id, address: stored.has(id) ? `/episode/${encodeURIComponent(id)}` : "" }));
  },
};

function desktopsOf(server, areSeveral) {
  const about = { screenSize: server.status.server.screen.split("x").map(Number), isLost: server.state === "lost" };
  const where = areSeveral ? `on ${server.name}` : "";
  return server.status.replicas.map((replica) => ({ id: keyOf(server.url, replica.id), name: replica.id, where, replica, server: about }));
}

function showCondition(kind, text) {
  byId("condition").className = `badge ${kind}`;
  setText(byId("condition"), text);
}

function showServers(servers, names) {
  const numLost = servers.filter((server) => server.state === "lost").length;
  const numLive = servers.reduce((sum, server) => sum + (server.status ? server.status.num_live : 0), 0);
  if (numLost) showCondition("lost", `no answer from ${numLost} of ${counted(servers.length, "env server")}`);
  else showCondition(servers.length ? "ok" : "", servers.length ? `${counted(servers.length, "env server")}, ${counted(numLive, "episode")}` : "no env server yet");
  const rows = [
    ...servers.map((server) => [server.name, server.state, WORDS[server.state], aboutServer(server)]),
    ...names.map(({ address, problem }) => [address, "lost", "not resolved", problem]),
  ];
  const list = byId("servers");
  while (list.children.length > rows.length) list.lastChild.remove();
  rows.forEach(([name, state, word, text], index) => {
    const row = list.children[index] || list.appendChild(newServer());
    setText(row.children[0], name);
    row.children[1].className = `badge ${state === "serving" ? "ok" : state}`;
    setText(row.children[1], word);
    setText(row.children[2], text);
  });
}

function newServer() {
  const row = document.createElement("li");
  row.append(...["b", "span", "span"].map((kind) => document.createElement(kind)));
  return row;
}

function aboutServer({ state, problem, silent_s: silent, status }) {
  if (state === "lost") return `for ${duration(silent)}: ${problem}`;
  if (!status) return "";
  const waiting = status.num_waiting ? `, ${status.num_waiting} waiting` : "";
  return `${status.server.provider}, ${counted(status.replicas.length, "desktop")}, ${status.num_free} free${waiting}`;
}

refresh();
