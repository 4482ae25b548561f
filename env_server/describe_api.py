"""docs/env-server-api.md: api/docs_page/head.md, then the OpenAPI document of the application that is served.
Written by `python -m env_server.describe_api > docs/env-server-api.md`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from env_server.api.osgym.routes import osgym_app
from env_server.app import create_app
from env_server.main import make_drivers, make_provider
from env_server.replicas.pool import Pool
from env_server.server_settings import ServerSettings

Schema = Mapping[str, Any]

HEAD = Path(__file__).parent / "api/docs_page/head.md"
SURFACES = {
    "/v1": ("Our own API", "Episodes with numbered steps, replicas, and information about the server."),
    "/envs": ("AReaL's bridge", "For AReaL's remote environment, which needs no changes."),
    "/osgym": ("OSGym", "On the main port under `/osgym`; a worker port has the same without `/osgym`."),
    "/healthz": ("Probes", ""),
    "/readyz": ("Probes", ""),
    "/metrics": ("Probes", ""),
    "": ("Slime-OSWorld", "For Slime-OSWorld's HTTP client, which needs no changes."),
}
"""(title, description) by the beginning of the path."""


def describe() -> str:
    """The whole page, in Markdown."""
    settings = ServerSettings()
    pool = Pool(make_provider(settings), num_replicas=1, queue_timeout_s=1.0)
    app = create_app(pool, settings, make_drivers(settings), drain=lambda limit_s: limit_s)
    osgym = osgym_app(app.state.episodes, settings)
    sections: dict[str, list[str]] = {}
    schemas: dict[str, Schema] = {}
    for prefix, api in (("", app.openapi()), ("/osgym", osgym.openapi())):
        schemas |= api["components"]["schemas"]
        for path, methods in api["paths"].items():
            for method, operation in methods.items():
                title, about = _surface(prefix + path)
                lines = sections.setdefault(title, [f"## {title}", *([about] if about else [])])
                lines += _operation(f"{method.upper()} {prefix}{path}", operation)
    answers = [f"- {number}: {text}" for number, text in _failures(app.openapi())]
    parts = [HEAD.read_text().strip(), "\n".join(answers)]
    for lines in sections.values():
        parts += lines
    parts.append("## Messages")
    for name in sorted(name for name in schemas if "ValidationError" not in name):
        parts += _message(name, schemas[name])
    return "\n\n".join(parts) + "\n"


def _surface(path: str) -> tuple[str, str]:
    return next(
        found for start, found in SURFACES.items() if path == start or path.startswith(f"{start}/") or not start
    )


def _failures(api: Schema) -> Iterator[tuple[str, str]]:
    for number, answer in api["paths"]["/v1/episodes"]["post"]["responses"].items():
        if int(number) >= 400:
            yield number, answer["description"]


def _operation(name: str, operation: Schema) -> Iterator[str]:
    yield f"### {name}"
    yield _sentence(f"{operation.get('summary', '')}. {operation.get('description') or ''}")
    query = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
    if query:
        rows = [(one["name"], one["schema"], one.get("required"), one.get("description", "")) for one in query]
        yield _table("parameter of the query", rows)
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        yield f"Body: {_linked(content['schema'])}."
    answers = {number: answer for number, answer in operation["responses"].items() if int(number) < 300}
    for number, answer in answers.items():
        kinds = answer.get("content", {})
        body_types = [
            _linked(found["schema"]) if kind == "application/json" else f"`{kind}`" for kind, found in kinds.items()
        ]
        yield f"Answer: {number}{', ' if body_types else ''}{' or '.join(body_types)}."


def _message(name: str, schema: Schema) -> Iterator[str]:
    yield f"### {name}"
    if schema.get("description"):
        yield _sentence(schema["description"])
    required = schema.get("required", ())
    rows = [
        (field, found, field in required, found.get("description", ""))
        for field, found in schema.get("properties", {}).items()
    ]
    if rows:
        yield _table("field", rows)
    for field, found in schema.get("properties", {}).items():
        for example in found.get("examples", ())[:1]:
            if isinstance(example, dict):
                yield f"`{field}`, for example:\n```json\n{json.dumps(example, indent=1)}\n```"


def _table(first: str, rows: list[tuple[str, Schema, Any, str]]) -> str:
    lines = [f"| {first} | type | default | means |", "|---|---|---|---|"]
    for name, schema, is_required, about in rows:
        given = "required" if is_required else f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
        lines.append(f"| `{name}` | {_type(schema)} | {given} | {_sentence(about)} |")
    return "\n".join(lines)


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        return _linked(schema)
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        inner = schema.get("prefixItems")
        return f"({', '.join(map(_type, inner))})" if inner else f"list of {_type(schema['items'])}"
    bounds = [
        f"{word} {schema[key]:g}" for key, word in (("minimum", "at least"), ("maximum", "at most")) if key in schema
    ]
    return " ".join([str(schema.get("type", "anything")), *([", ".join(bounds)] if bounds else [])])


def _linked(schema: Schema) -> str:
    if "$ref" not in schema:
        return _type(schema)
    name = schema["$ref"].rpartition("/")[2]
    return f"[{name}](#{name.lower()})"


def _sentence(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()).strip()


if __name__ == "__main__":
    print(describe(), end="")
