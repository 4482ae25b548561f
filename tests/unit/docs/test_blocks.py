"""Every query, configuration and program in the documentation works."""

import ast
import importlib
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_links import Block, Page
from command_lines import commands_of
from episode_samples import make_episode

from env_server.config import make_settings
from env_server.providers.gateway.clients import ENTRY_POINTS as SANDBOX_CLIENTS
from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import EpisodePurpose
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.recipes.describe import keys
from osworld_pipeline.recipes.engine_names import ENTRY_POINTS as ENGINES
from osworld_pipeline.recipes.schema import Recipe
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.tables.query import run_query
from resources.program_launcher import ENTRY_POINTS as LAUNCHERS

ROOT = Path(__file__).resolve().parents[3]


def blocks(pages: dict[str, Page], *languages: str) -> Iterator[tuple[str, Block]]:
    for name, page in pages.items():
        for block in page.blocks:
            if block.language in languages:
                yield f"{name}:{block.line}", block


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    """A state folder with two episodes, two checkpoints and a catalog."""
    state = StateDir(tmp_path_factory.mktemp("store"))
    store = TrajectoryStore(state)
    store.write_episodes("e", [make_episode("e0", stage_key="eval-sft-000000000001-0123456789ab")])
    store.write_episodes(
        "t", [make_episode("t0", purpose=EpisodePurpose.TRAIN, stage_key="gspo_phase2-1", update=0, group_id="g0")]
    )
    for name, stage, parent in (("sft-000000000001", Stage.SFT, None), ("gspo_phase2-1", Stage.GSPO_PHASE2, "sft")):
        upsert_checkpoint(state, Checkpoint(
            checkpoint_id=name, stage=stage, parent_id=parent, path=name, num_updates=1, recipe_digest="",
            data_digest="", weights_digest="",
        ))  # fmt: skip
    rebuild_catalog(state)
    return state


def test_every_query_is_one_that_the_catalog_answers(pages: dict[str, Page], state: StateDir) -> None:
    queries = {where: block.text for where, block in blocks(pages, "sql")}
    for name, page in pages.items():
        for command in commands_of(name, page):
            if command.program == "osworld-pipeline" and command.words[1:2] == ("query",) and len(command.words) > 2:
                queries[f"{command.where} {len(queries)}"] = command.words[2]
    # Queries that come from a file, or are left to the reader, cannot be run here.
    real = {where: sql for where, sql in queries.items() if sql.strip() != "SELECT" and sql[0] != " "}
    assert len(real) > 25
    for where, sql in real.items():
        try:
            run_query(state, sql)
        except Exception as error:
            raise AssertionError(f"{where}: {error}") from error


def test_every_toml_block_is_part_of_a_recipe_or_of_settings_or_names_entry_points(pages: dict[str, Page]) -> None:
    found = list(toml_blocks(pages))
    assert len(found) >= 2
    wrong = []
    for where, document in found:
        if set(document) <= {*Recipe.model_fields, "name"}:
            unknown = set(dotted(document)) - {*dict(keys()), "name"}
            wrong += [f"{where}: no recipe has {key}" for key in sorted(unknown)]
        elif set(document) == {"project"}:
            unknown = document["project"]["entry-points"].keys() - {LAUNCHERS, SANDBOX_CLIENTS, ENGINES}
            wrong += [f"{where}: nothing reads the entry points {group}" for group in sorted(unknown)]
        else:
            make_settings(document)
    assert wrong == []


def toml_blocks(pages: dict[str, Page]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The blocks marked as TOML, and the unmarked blocks that are valid TOML."""
    for where, block in blocks(pages, "toml", ""):
        try:
            document = tomllib.loads(block.text)
        except tomllib.TOMLDecodeError:
            assert block.language == "", f"{where} is no TOML"
            continue
        if document:
            yield where, document


def dotted(document: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_every_setting_of_a_recipe_that_the_text_names_exists(pages: dict[str, Page]) -> None:
    """Checks inline code of the form `section.key` or `section.key=value`, with a section of a recipe."""
    known = dict(keys())
    tables = {key.rpartition(".")[0] for key in known} | set(known)
    sections = "|".join(name for name in Recipe.model_fields if name not in ("name", "sources"))
    named = re.compile(rf"(?:{sections})(?:\.[a-z][a-z_0-9]*)+")
    wrong = []
    for name, page in pages.items():
        if name.startswith("docs/decisions/"):
            continue  # they also describe what was not chosen
        for line, text in page.spans:
            key = text.partition("=")[0].strip()
            if named.fullmatch(key) and key not in tables and not is_other(key):
                wrong.append(f"{name}:{line}: no recipe has {key}")
    assert wrong == []


def is_other(key: str) -> bool:
    """Names that only look alike: a file, a column, a program of `osworld_pipeline.runs`, a resource's key."""
    return key.endswith((".py", ".toml", ".md")) or key in {"desktops.urls", "replay.row_id"}


def test_every_yaml_block_is_a_prometheus_or_a_run_configuration(pages: dict[str, Page]) -> None:
    for where, block in blocks(pages, "yaml"):
        document = yaml.safe_load(block.text)
        if "scrape_configs" in document:
            check_prometheus(document, where)
            continue
        assert next(iter(document)) in ("resources", "ops"), f"{where}: no test knows what it configures"


def check_prometheus(document: dict[str, Any], where: str) -> None:
    """The target files that it names are those that programs write if the state folder is /data/osworld."""
    folder = StateDir(Path("/data/osworld")).metrics_targets
    files = [one["files"] for job in document["scrape_configs"] for one in job.get("file_sd_configs", ())]
    assert files == [[f"{folder}/*.json"]], where


def test_every_json_block_is_json_and_a_task_in_it_can_be_run(pages: dict[str, Page]) -> None:
    num_tasks = 0
    for where, block in blocks(pages, "json"):
        document = json.loads(block.text)
        entries = document if isinstance(document, list) else [document]
        for entry in entries:
            if isinstance(entry, dict) and "evaluator" in entry:
                num_tasks += 1
                assert Task.from_config(entry).instruction, where
    assert num_tasks >= 1


def test_every_python_block_is_valid_python_and_imports_only_existing_names(pages: dict[str, Page]) -> None:
    for where, block in blocks(pages, "python"):
        for node in ast.walk(ast.parse(block.text, filename=where)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
                ("osworld_pipeline", "env_server", "resources")
            ):
                module = importlib.import_module(str(node.module))
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert missing == [], f"{where}: {node.module} has no {missing}"


def test_every_language_of_a_block_is_one_that_is_checked(pages: dict[str, Page]) -> None:
    checked = {"", "sh", "bash", "console", "text", "sql", "toml", "yaml", "json", "python"}
    assert {block.language for page in pages.values() for block in page.blocks} <= checked


def test_every_file_of_the_project_that_the_text_names_exists(pages: dict[str, Page]) -> None:
    """Checks inline code that is a path below one of our folders."""
    folders = "assets|benchmarks|deploy|docs|env_server|jobs|osworld_pipeline|resources|scripts|tests"
    named = re.compile(rf"(?:{folders})/[\w./-]+\.(?:py|md|toml|yaml|jinja|txt|png|sh)")
    wrong = [
        f"{name}:{line}: there is no {text}"
        for name, page in pages.items()
        if name != "CHANGELOG.md"
        for line, text in page.spans
        if named.fullmatch(text) and not (ROOT / text).exists()
    ]
    assert wrong == []
