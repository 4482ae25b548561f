"""`init` writes a project folder, and a checkout is one."""

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml
from typer.testing import CliRunner

from osworld_pipeline.cli import app
from osworld_pipeline.domain.version import installed_version
from osworld_pipeline.errors import DependencyError, RecipeError, StoreError
from osworld_pipeline.project import need_project, project_files, template, write_project
from osworld_pipeline.recipes import load_recipe

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("name", "of"), [("dagster.yaml",) * 2, ("workspace.yaml",) * 2, (".env", "env")])
def test_the_checkout_has_the_files_that_init_writes(name: str, of: str) -> None:
    assert (ROOT / name).read_text() == template(of)


def test_a_folder_gets_every_file_and_the_recipe_can_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "project"
    written = write_project(folder, project_files(recipe="smoke"))
    assert sorted(path.name for path in folder.iterdir()) == sorted(file.name for file in written)
    assert [file.name for file in written] == [
        "dagster.yaml", "workspace.yaml", ".env", "recipe.toml", "deployment.yaml", "compose.yaml",
    ]  # fmt: skip
    mine, shipped = load_recipe(str(folder / "recipe.toml")), load_recipe("smoke")
    assert mine.model_dump(exclude={"name", "sources"}) == shipped.model_dump(exclude={"name", "sources"})


def test_files_that_exist_are_kept_unless_asked(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("MINE=1\n")
    assert [file.name for file in write_project(tmp_path, project_files())] == [
        "dagster.yaml", "workspace.yaml", "recipe.toml", "deployment.yaml", "compose.yaml",
    ]  # fmt: skip
    assert (tmp_path / ".env").read_text() == "MINE=1\n"
    assert write_project(tmp_path, project_files()) == []
    assert len(write_project(tmp_path, project_files(is_postgres=True), overwrites=True)) == 6
    assert "DAGSTER_PG_HOST" in (tmp_path / "dagster.yaml").read_text()


def test_a_project_that_cannot_be_written_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file is not a folder"):
        write_project(tmp_path / "file", project_files())
    with pytest.raises(RecipeError, match="no recipe named 'smok'"):
        project_files(recipe="smok")


def test_without_a_project_the_error_names_init(tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match=f"there is no dagster.yaml in {tmp_path}: .*osworld-pipeline init`"):
        need_project(tmp_path)


def test_init_prints_what_it_wrote_and_what_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = CliRunner().invoke(app, ["init"])
    assert first.exit_code == 0
    assert first.stdout.count("wrote  ") == 6
    second = CliRunner().invoke(app, ["init"])
    assert (second.stdout.count("wrote  "), second.stdout.count("kept   ")) == (0, 6)


def test_without_a_command_the_program_shows_the_next_step_on_one_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OSWORLD_STATE", raising=False)
    reported = CliRunner().invoke(app, []).stdout
    assert "no project" in reported
    assert reported.index("osworld-pipeline init") < reported.index("osworld-pipeline demo")
    CliRunner().invoke(app, ["init"])
    reported = CliRunner().invoke(app, []).stdout
    assert "osworld-pipeline init" not in reported
    assert "osworld-pipeline dev" in reported
    (tmp_path / "var" / "checkpoints" / "sft-1").mkdir(parents=True)
    (tmp_path / "var" / "osworld.duckdb").touch()
    reported = CliRunner().invoke(app, []).stdout
    assert "1 checkpoint, catalog of " in reported
    assert "osworld-pipeline view" in reported
    assert "osworld-pipeline setup" not in reported
    assert len(reported.splitlines()) < 24


def test_recipes_are_listed_and_printed() -> None:
    listed = CliRunner().invoke(app, ["recipes"])
    assert listed.stdout.splitlines()[-3].startswith("smoke ")
    assert CliRunner().invoke(app, ["recipes", "smoke"]).stdout.startswith("# All stages in about a minute")


def compose() -> dict[str, Any]:
    (text,) = (file.text for file in project_files() if file.name == "compose.yaml")
    return yaml.safe_load(text)


def test_the_compose_file_names_images_of_this_version_and_publishes_only_on_loopback() -> None:
    services = compose()["services"]
    assert sorted(services) == ["dagster", "env-server", "mlflow", "viewer"]
    for name, service in services.items():
        assert service["image"].endswith(f":{installed_version() or 'latest'}"), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_every_service_has_a_health_check_on_the_port_of_its_program() -> None:
    for name, service in compose()["services"].items():
        (port,) = re.findall(r"--port (\d+)", service["command"])
        test = " ".join(service["healthcheck"]["test"])
        assert f"http://127.0.0.1:{port}/" in test, name


def test_no_service_that_listens_beyond_loopback_starts_without_its_token() -> None:
    services = compose()["services"]
    assert services["env-server"]["environment"]["ENV_SERVER_TOKEN"].startswith("${ENV_SERVER_TOKEN:?")
    assert services["viewer"]["environment"]["OSWORLD_VIEWER_TOKEN"].startswith("${OSWORLD_VIEWER_TOKEN:?")


def test_the_viewer_of_the_compose_file_shows_its_env_server_and_is_linked_from_there() -> None:
    services = compose()["services"]
    viewer, server = services["viewer"], shlex.split(services["env-server"]["command"])
    words = shlex.split(viewer["command"])
    assert words[words.index("--env-server-url") + 1] == f"http://env-server:{server[server.index('--port') + 1]}"
    assert "ENV_SERVER_TOKEN" in viewer["environment"]
    address = f"http://{viewer['ports'][0].rpartition(':')[0]}"
    assert server[server.index("--viewer-url") + 1] == address
    assert services["dagster"]["environment"]["OSWORLD_VIEWER_URL"] == address


def test_the_commands_of_the_compose_file_are_accepted() -> None:
    pipeline = typer.main.get_command(app)
    assert isinstance(pipeline, click.Group)
    for service in compose()["services"].values():
        program, *words = shlex.split(service["command"])
        if program == "osworld-pipeline":
            pipeline.commands[words[0]].make_context(words[0], words[1:])
