"""The command in a message can be pasted: it does what the message says, with the requested settings."""

from pathlib import Path

import click
import duckdb
import pytest
from checkpoint_samples import lay_down, make_checkpoint
from episode_samples import make_episode
from pasted import pasted

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.store.part_files import MANIFEST
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.query import run_query

"""Typer uses, while it is imported, what a later click will not have."""

COUNT = "SELECT count(*) AS n FROM episodes"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """A state with one episode and one checkpoint, in a folder whose name needs quotes."""
    state = StateDir(tmp_path / "my state")
    TrajectoryStore(state).write_episodes("p1", [make_episode("e1"), make_episode("e2")])
    lay_down(state, make_checkpoint("sft-1"))
    rebuild_catalog(state)
    return state


def call(*arguments: str) -> None:
    from osworld_pipeline.cli import app

    app(list(arguments), standalone_mode=False)


def advice_of(*arguments: str) -> list[str]:
    with pytest.raises(PipelineError) as refused:
        call(*arguments)
    return pasted(str(refused.value))


def recipe_of(arguments: list[str]) -> Recipe:
    """The recipe of the command, with its options read by its own parser."""
    import typer

    from osworld_pipeline.cli import app

    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    name, *words = arguments
    below = command.commands[name]
    values = below.make_context(name, words).params
    return load_recipe(values["recipe"], settings=values["settings"] or [], is_smoke=values["smoke"])


SETTINGS = ("--set", "evaluation.temperature=0.6", "--set", "evaluation.seeds=[0, 1]")


@pytest.mark.parametrize("size", [(), ("--smoke",)])
def test_a_report_of_a_suite_advises_a_backfill_with_its_own_settings(state: StateDir, size: tuple[str, ...]) -> None:
    choice = ("--recipe", "smoke", *SETTINGS, *size)
    advised = advice_of("report", "--suite", "heldout", *choice, "--state", str(state.root))
    assert advised[:3] == ["backfill", "--suites", "heldout"]
    assert advised[-2:] == ["--state", str(state.root)]
    wanted = load_recipe("smoke", settings=SETTINGS[1::2], is_smoke=bool(size))
    assert recipe_of(advised) == wanted
    assert wanted.evaluation.seeds == (0, 1)


def test_a_recipe_of_a_file_is_named_by_a_path_that_works_from_any_folder(
    state: StateDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).resolve().parents[2] / "osworld_pipeline/recipes/smoke.toml"
    (tmp_path / "mine.toml").write_text(source.read_text())
    monkeypatch.chdir(tmp_path)
    advised = advice_of("report", "--suite", "heldout", "--recipe", "mine.toml", "--state", str(state.root))
    monkeypatch.chdir("/")
    assert recipe_of(advised).name == "mine"


def test_without_any_evaluation_a_report_advises_one_with_its_own_settings(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    lay_down(state, make_checkpoint("sft-1"))
    choice = ("--recipe", "smoke", *SETTINGS)
    advised = advice_of("report", *choice, "--state", str(state.root))
    assert advised[0] == "evaluate"
    assert recipe_of(advised).evaluation.temperature == 0.6


def test_a_backfill_without_checkpoints_advises_a_training_by_its_own_recipe(tmp_path: Path) -> None:
    advised = advice_of("backfill", "--recipe", "smoke", *SETTINGS, "--state", str(tmp_path))
    assert advised[0] == "train"
    assert recipe_of(["backfill", *advised[1:]]).evaluation.seeds == (0, 1)


def test_a_damaged_catalog_is_rebuilt_by_the_command_in_the_error(state: StateDir) -> None:
    state.catalog.write_bytes(b"no catalog")
    call(*advice_of("query", COUNT, "--state", str(state.root)))
    assert run_query(state, COUNT).rows == [(2,)]


def test_a_lost_manifest_is_rebuilt_by_the_command_in_the_error_of_a_notebook(state: StateDir) -> None:
    TrajectoryStore(state).write_episodes("p2", [make_episode("e3")])
    compact_store(state, min_parts=2)
    (state.trajectories / MANIFEST).unlink()
    with duckdb.connect(str(state.catalog), read_only=True) as notebook, pytest.raises(duckdb.Error) as refused:
        notebook.execute(COUNT)
    call(*pasted(str(refused.value)))
    assert run_query(state, COUNT).rows == [(3,)]


def test_the_error_for_a_folder_that_is_not_an_export_names_the_export_command(tmp_path: Path) -> None:
    target = tmp_path / "dataset"
    with pytest.raises(PipelineError) as refused:
        call("publish", "dataset", str(target), "--repo", "me/mine", "--dry-run")
    (_, advised, _) = str(refused.value).split("`")
    assert advised.split()[1:] == ["export", "huggingface", str(target)]
