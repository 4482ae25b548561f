"""Every command of every program has the option --json, and a wrong option is JSON with it."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from env_server import main as env_server
from env_server.gateway_server import main as gateway
from osworld_pipeline.cli import app
from osworld_pipeline.domain.version import installed_version
from osworld_pipeline.programs.answers import FLAG

ROOT = Path(__file__).resolve().parents[3]
SERVERS = {"env-server": env_server.main, "osworld-gateway": gateway.main}
WITHOUT: frozenset[str] = frozenset()
"""Commands without --json. A new one needs its reason here."""


def commands_of(command: click.Command, *words: str) -> Iterator[tuple[str, click.Command]]:
    """Commands that do something themselves; a group that only has subcommands is not included."""
    below = command.commands if isinstance(command, click.Group) else {}
    if not below or (isinstance(command, click.Group) and command.invoke_without_command):
        yield " ".join(words), command
    for name, each in below.items():
        yield from commands_of(each, *words, name)


def help_of(program: str, *words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        SERVERS[program]([*words, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_every_command_of_osworld_pipeline_has_json() -> None:
    found = dict(commands_of(typer.main.get_command(app)))
    assert {"", "view", "setup", "checkpoint add", "remote collect-garbage"} <= set(found)
    assert len(found) > 35
    lacking = {name for name, command in found.items() if not any(FLAG in each.opts for each in command.params)}
    assert lacking == WITHOUT


def test_every_command_of_the_servers_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"osworld-pipeline", *SERVERS}
    calls = [(program,) for program in SERVERS] + [("env-server", name) for name in env_server.COMMANDS]
    below = re.search(r"\{([a-z,]+)\}", help_of("env-server", "osgym", capsys=capsys))
    assert below is not None
    calls.remove(("env-server", "osgym"))
    calls += [("env-server", "osgym", name) for name in below[1].split(",")]
    assert len(calls) == 7
    assert [call for call in calls if f" {FLAG} " not in help_of(*call, capsys=capsys)] == []


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("env-server", ["--replicas", "none"]),
        ("env-server", ["build-image", "--no-such-option"]),
        ("env-server", ["osgym", "status", "--grace-s", "x"]),
        ("env-server", ["osgym", "start", "--providr", "local", "--no-such-option"]),
        ("env-server", ["doctor", "no-such-check"]),
        ("osworld-gateway", ["--quota", "0"]),
    ],
)
def test_a_wrong_option_of_a_server_gives_one_json_object(
    program: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = SERVERS[program]([*words, FLAG])
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    error = json.loads(said.err)["error"]
    assert (said.out, error["exit_status"]) == ("", status)
    assert error["type"] == ("SettingsError" if "status" in words else "UsageError")


def test_the_overview_as_json_names_the_state_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "var" / "checkpoints" / "sft-1").mkdir(parents=True)
    app([FLAG], standalone_mode=False)
    answer = json.loads(capfdbinary.readouterr().out)
    assert (answer["version"], answer["folder"], answer["is_project"]) == (installed_version(), str(tmp_path), False)
    assert (answer["state"]["num_checkpoints"], answer["state"]["catalog_changed_at"]) == (1, None)
    assert any(each["command"].endswith("demo --recipe smoke") for each in answer["next"])


def test_json_before_the_name_of_a_command_is_refused() -> None:
    with pytest.raises(click.UsageError, match="it belongs after the command's name"):
        app([FLAG, "recipes"], standalone_mode=False)
