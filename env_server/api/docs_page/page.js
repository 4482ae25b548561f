"use strict";
// Reads the server's OpenAPI document with the token, and sends requests from the page. All text is set as text.
const KEY = "env-server-token", LIMIT_MS = 600000, MAX_SHOWN = 4000;
const byId = (id) => document.getElementById(id);
let token = sessionStorage.getItem(KEY) || "";

class RefusedError extends Error {}

function element(name, text = "", properties = {}) {
  return Object.assign(document.createElement(name), { textContent: text }, properties);
}

function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  return fetch(path.replace(/^\//, ""), { ...options, headers, cache: "no-store", signal: AbortSignal.timeout(LIMIT_MS) });
}

async function read(path) {
  const answer = await ask(path);
  if (answer.status === 401) throw new RefusedError();
  if (!answer.ok) throw new Error(`${path} was answered ${answer.status}`);
  return answer.json();
}

function resolve(schema, api) {
  const name = (schema.$ref || "").split("/").pop();
  return name ? api.components.schemas[name] : schema;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  return schema.items ? `list of ${typeOf(schema.items)}` : schema.type || "anything";
}

function exampleOf(schema, api) {
  const found = resolve(schema, api);
  if (found.examples) return found.examples[0];
  if ("default" in found) return found.default;
  if (found.properties) {
    const names = (found.required || []).filter((name) => name in found.properties);
    return Object.fromEntries(names.map((name) => [name, exampleOf(found.properties[name], api)]));
  }
  return { string: "", integer: found.minimum || 0, number: 0, boolean: false, array: [], object: {} }[found.type] ?? null;
}

function fieldsOf(schema, api) {
  const found = resolve(schema, api), table = element("table");
  for (const [name, field] of Object.entries(found.properties || {})) {
    const row = element("tr"), first = element("td");
    first.append(element("code", name));
    const needed = (found.required || []).includes(name);
    const given = needed ? "required" : "default" in field ? `default ${JSON.stringify(field.default)}` : "optional";
    row.append(first, element("td", typeOf(field)), element("td", given), element("td", field.description || ""));
    table.append(row);
  }
  return table;
}

function inputs(operation, path, method) {
  const names = [...path.matchAll(/\{(\w+)\}/g)].map((found) => ({ name: found[1], in: "path", required: true }));
  const query = (operation.parameters || []).filter((parameter) => parameter.in === "query");
  return [...names, ...query].map((parameter) => {
    const input = element("input", "", { placeholder: parameter.name, ariaLabel: `${parameter.name} of ${method} ${path}` });
    return { ...parameter, input };
  });
}

function trial(operation, path, method, schema, api) {
  const form = element("form"), row = element("div", "", { className: "row" }), shown = element("pre", "", { hidden: true });
  const parameters = inputs(operation, path, method);
  const body = schema ? element("textarea", JSON.stringify(exampleOf(schema, api), null, 1), { ariaLabel: `body of ${method} ${path}`, spellcheck: false }) : null;
  row.append(...parameters.map((one) => one.input), element("button", `Send ${method} ${path}`, { type: "submit" }));
  form.append(...(body ? [body] : []), row, shown);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    let address = path;
    const query = new URLSearchParams();
    for (const { name, in: place, input } of parameters) {
      if (place === "path") address = address.replace(`{${name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(name, input.value);
    }
    const options = body ? { method, body: body.value, headers: { "Content-Type": "application/json" } } : { method };
    shown.hidden = false;
    shown.textContent = "waiting for the answer";
    try {
      const answer = await ask(query.size ? `${address}?${query}` : address, options);
      const type = answer.headers.get("content-type") || "";
      const text = /json|text/.test(type) ? await answer.text() : `${(await answer.blob()).size} bytes of ${type || "nothing"}`;
      shown.textContent = `${answer.status}\n${text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)} ...` : text}`;
    } catch (error) {
      shown.textContent = String(error);
    }
  });
  return form;
}

function show(prefix, api) {
  const sections = new Map();
  for (const [suffix, methods] of Object.entries(api.paths)) {
    for (const [name, operation] of Object.entries(methods)) {
      const path = prefix + suffix, method = name.toUpperCase(), surface = (operation.tags || [api.info.title])[0];
      if (!sections.has(surface)) sections.set(surface, element("section"));
      const details = element("details"), summary = element("summary");
      summary.append(element("span", method, { className: "method" }), " ", element("code", path), ` ${operation.summary || ""}`);
      details.append(summary, element("p", operation.description || ""));
      const schema = operation.requestBody && Object.values(operation.requestBody.content)[0].schema;
      if (schema) details.append(fieldsOf(schema, api));
      details.append(trial(operation, path, method, schema, api));
      sections.get(surface).append(details);
    }
  }
  for (const [surface, section] of sections) {
    section.prepend(element("h2", surface));
    byId("operations").append(section);
  }
}

function askForToken(problem) {
  byId("token-form").hidden = false;
  byId("token-error").textContent = problem;
  byId("token").focus();
}

async function load() {
  try {
    const found = [["", await read("openapi.json")]];
    // OSGym's API answers only the addresses of its clients.
    const osgym = await ask("osgym/openapi.json");
    if (osgym.ok) found.push(["/osgym", await osgym.json()]);
    byId("token-form").hidden = true;
    byId("operations").replaceChildren();
    found.forEach(([prefix, api]) => show(prefix, api));
  } catch (error) {
    if (!(error instanceof RefusedError)) { byId("problem").textContent = String(error); return; }
    sessionStorage.removeItem(KEY);
    token = "";
    askForToken("The server refused this token.");
  }
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = byId("token").value.trim();
  byId("token").value = "";
  sessionStorage.setItem(KEY, token);
  load();
});
if (document.body.dataset.needsToken === "true" && !token) askForToken("");
else load();
