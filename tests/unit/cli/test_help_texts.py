"""The help of every command is running text, also in the lists of commands, and every parameter has a help text."""

from collections.abc import Iterator

import click
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from osworld_pipeline.cli import app


def commands(group: TyperGroup, name: str = "") -> Iterator[tuple[str, click.Command]]:
    for word, command in group.commands.items():
        yield f"{name} {word}".strip(), command
        if isinstance(command, TyperGroup):
            yield from commands(command, word)


def all_commands() -> dict[str, click.Command]:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    found = dict(commands(group))
    assert {"evaluate", "export slime", "checkpoint add"} <= set(found)
    return found


def test_no_help_text_has_a_line_break_within_a_paragraph() -> None:
    texts = {name: command.help or "" for name, command in all_commands().items()}
    assert [name for name, text in texts.items() if "\n" in text.replace("\n\n", "")] == []
    assert [name for name, text in texts.items() if not text.strip()] == []


def test_every_parameter_has_a_help_text_and_an_argument_shows_it() -> None:
    """Incompatible versions of Typer and Click lose the help texts of arguments."""
    without = [
        f"{name}: {parameter.name}"
        for name, command in all_commands().items()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert without == []
    assert "The project folder" in CliRunner().invoke(app, ["init", "--help"]).output
