// The env server's own part: its condition, its totals, and the token, which stays in this tab.
const OUTCOMES = ["evaluated", "closed", "idle", "client_gone", "shutdown", "env_fault", "grader_fault", "tampering", "touched"];
const KEY = "env-server-token";
let token = sessionStorage.getItem(KEY) || "", viewerUrl = "";

const page = {
  figures: "status.json",
  stream: (ids, width) => `status/live?width=${width}&${ids.map((id) => `replica=${encodeURIComponent(id)}`).join("&")}`,
  pictureOf: (card, width) => `status/replicas/${encodeURIComponent(card.id)}/picture?width=${width}`,
  headers: () => (token ? { Authorization: `Bearer ${token}` } : {}),
  refused() {
    sessionStorage.removeItem(KEY);
    token = "";
    showTokenForm("The server refused this token.");
  },
  show(data) {
    byId("token-form").hidden = true;
    byId("board").hidden = false;
    showServer(data);
    const server = { screenSize: data.server.screen.split("x").map(Number), isLost: false };
    return data.replicas.map((replica) => ({ id: replica.id, name: replica.id, replica, server }));
  },
  afterShow: (data) => showPerson(data.server),
  lost(lastAnswerAt) {
    byId("condition").className = "badge lost";
    setText(byId("condition"), lastAnswerAt ? `no answer since ${lastAnswerAt.toLocaleTimeString()}` : "no answer");
  },
  records({ replica }) {
    const id = (replica.episode || replica.last || {}).record_id;
    return id ? [{ word: "episode", id, address: viewerUrl && `${viewerUrl}/episode/${encodeURIComponent(id)}` }] : [];
  },
};

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

function showTokenForm(problem) {
  byId("token-form").hidden = false;
  byId("board").hidden = true;
  setText(byId("token-error"), problem);
  byId("condition").className = "badge";
  setText(byId("condition"), "locked");
  byId("token").focus();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  sessionStorage.setItem(KEY, token);
  byId("token").value = "";
  setText(byId("token-error"), "");
  refresh();
});
if (document.body.dataset.needsToken === "true" && !token) showTokenForm(""); else refresh();
