"""Reference pages match the code: every check, message and key, and every endpoint of others that is ours too."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from check_links import Page
from fastapi import FastAPI

from env_server.api import areal, slime
from env_server.api.osgym import routes as osgym
from env_server.describe_api import describe as describe_api
from env_server.server_settings import ServerSettings
from osworld_pipeline.doctor.external_services import DESKTOP_CHECKS
from osworld_pipeline.doctor.roles import ROLES
from osworld_pipeline.domain.python_text import parse_python
from osworld_pipeline.recipes import recipe_names
from osworld_pipeline.recipes.describe import keys as recipe_keys
from osworld_pipeline.recipes.environment import VARIABLES
from osworld_pipeline.task_schema.getters import GETTERS
from osworld_pipeline.task_schema.metrics import METRICS
from osworld_pipeline.task_schema.verbs import VERBS
from resources.describe import OWN_VARIABLES, describe, keys

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("osworld_pipeline", "env_server", "resources", "assets", "jobs")
BLANK = "…"


def rows(page: Page, first_column: str) -> list[list[str]]:
    """The cells, in Markdown, of the tables whose first column has that name."""
    text = page.path.read_text()
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *body = table.strip().splitlines()
        if cells(head)[0] == first_column:
            found += [cells(line) for line in body]
    return found


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def test_the_configuration_page_is_the_description_generated_from_the_resources() -> None:
    page = ROOT / "docs/configuration.md"
    assert page.read_text() == describe(), "python -m resources.describe > docs/configuration.md"


def test_the_page_of_the_env_servers_api_is_what_the_application_serves() -> None:
    page = ROOT / "docs/env-server-api.md"
    assert page.read_text() == describe_api(), "python -m env_server.describe_api > docs/env-server-api.md"


def test_the_page_of_the_env_servers_api_has_the_body_of_every_request(pages: dict[str, Page]) -> None:
    text = pages["docs/env-server-api.md"].path.read_text()
    for surface in ("Our own API", "Slime-OSWorld", "AReaL's bridge", "OSGym", "Probes"):
        assert f"\n## {surface}\n" in text
    assert re.search(
        r"### POST /v1/episodes/\{episode_id\}/steps\n(?:.*\n){1,4}\nBody: \[StepMessage\]\(#stepmessage\)", text
    )
    assert re.search(
        r"### StepMessage\n(?:.*\n)+?\| `pause` \| number at least 0, at most 60 \| `2.0` \| Seconds", text
    )


def test_every_key_of_a_resource_has_a_description() -> None:
    assert [name for name, field in keys() if not (field.description or "").strip()] == []
    assert len(list(keys())) > 20


def test_every_variable_that_is_listed_is_read_somewhere() -> None:
    text = "".join(path.read_text() for path in sources())
    read_elsewhere = {"DAGSTER_HOME"}
    assert [name for name, _, _ in OWN_VARIABLES if f'"{name}"' not in text and name not in read_elsewhere] == []


def test_the_troubleshooting_page_has_a_remedy_for_every_check_of_the_doctors(pages: dict[str, Page]) -> None:
    reported = [name for row in rows(pages["docs/troubleshooting.md"], "check") for name in names(row[0])]
    checks = {name for role in ROLES.values() for name in role.checks} | set(DESKTOP_CHECKS) | {"packages-lora"}
    assert sorted(reported) == sorted(checks | {"gateway"})
    assert all(row[2] for row in rows(pages["docs/troubleshooting.md"], "check"))


def test_every_message_of_the_troubleshooting_page_is_a_text_of_a_program(pages: dict[str, Page]) -> None:
    reported = [name for row in rows(pages["docs/troubleshooting.md"], "message") for name in names(row[0])]
    assert len(reported) > 20
    spoken = "\n".join(messages())
    missing = [message for message in reported if not all(part in spoken for part in pieces(message))]
    assert missing == []


def pieces(message: str) -> list[str]:
    return [part.strip() for part in message.split(BLANK) if part.strip()]


@cache
def messages() -> tuple[str, ...]:
    """Every text of the programs, with a blank for each value in it."""
    found = []
    for path in sources():
        for node in ast.walk(parse_python(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(v.value) if isinstance(v, ast.Constant) else BLANK for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return tuple(found)


def sources() -> Iterator[Path]:
    for folder in SOURCES:
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def endpoints() -> set[str]:
    """Every endpoint of the env server's surfaces, as `METHOD path`."""
    table: Any = SimpleNamespace(pool=SimpleNamespace(retry_after_s=1.0), on_timing=None)
    main = FastAPI()
    main.include_router(slime.slime_router(table))
    main.include_router(areal.areal_router(table, idle_ttl_s=1.0))
    return endpoints_of(main) | endpoints_of(osgym.osgym_app(table, ServerSettings(), on_fault=print), "/osgym")


def endpoints_of(app: FastAPI, prefix: str = "") -> set[str]:
    return {
        f"{method.upper()} {prefix}{path}" for path, methods in app.openapi()["paths"].items() for method in methods
    }


def test_every_endpoint_that_migration_names_is_served(pages: dict[str, Page], endpoints: set[str]) -> None:
    text = pages["docs/migration.md"].path.read_text()
    named = set()
    for line in text.splitlines():
        if line.startswith("| `") and len(cells(line)) > 1:
            named |= {name for name in names(cells(line)[1]) if re.match(r"(GET|POST|DELETE) /", name)}
    assert len(named) >= 15
    assert named - endpoints == set()


def test_every_variable_named_on_the_migration_page_fills_the_key_next_to_it(pages: dict[str, Page]) -> None:
    reported = {names(row[0])[0]: names(row[1]) for row in rows(pages["docs/migration.md"], "Slime-OSWorld")
            if names(row[0])[:1] and names(row[0])[0].startswith("OSWORLD_")}  # fmt: skip
    assert set(reported) == {variable.name for variable in VARIABLES}
    for variable in VARIABLES:
        assert variable.key is None or reported[variable.name] == [variable.key], variable.name


def test_every_recipe_checker_and_key_that_migration_names_exists(pages: dict[str, Page]) -> None:
    known = {name for name, _ in recipe_keys()}
    text = pages["docs/migration.md"].path.read_text()
    assert set(re.findall(r"recipe `([a-z0-9_]+)`", text)) <= set(recipe_names())
    checkers = set(re.findall(r"`(windows_(?:exact|date|names|has|non)[a-z_]*)`", text))
    assert len(checkers) == 5
    assert checkers <= set(METRICS)
    keys_named = set(re.findall(r"`((?:gspo|agent|desktop|rollout|replay|reward|trainer)\.[a-z0-9_.]+)`", text))
    assert len(keys_named) > 35
    assert keys_named <= known


def test_every_getter_and_verb_that_the_tutorial_names_exists(pages: dict[str, Page]) -> None:
    parts = {names(row[0])[0]: row[1] for row in rows(pages["docs/tutorial.md"], "part")}
    assert set(names(parts["config"])) <= set(VERBS)
    assert set(names(parts["evaluator.result"])) <= set(GETTERS)
    assert set(names(parts["evaluator.func"])) - {"conj"} <= set(METRICS)


def test_the_sites_navigation_has_every_page(pages: dict[str, Page]) -> None:
    def leaves(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif entry is not None:
            for below in entry.values() if isinstance(entry, dict) else entry:
                yield from leaves(below)

    named = list(leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    found = {name.removeprefix("docs/") for name in pages if name.startswith("docs/")}
    assert set(named) <= found
    assert {name for name in found - set(named) if not name.startswith("decisions/")} == set()
