"""Reads the command lines of a documentation page, and asks the programs' own parsers whether they would take them.
Nothing is run."""

import argparse
import contextlib
import importlib
import io
import itertools
import re
import shlex
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click
from check_links import Page

from env_server.gateway_server.main import make_parser as make_gateway_parser
from env_server.main import COMMANDS
from env_server.options import add_server_options

ROOT = Path(__file__).resolve().parents[3]
SHELL = ("", "sh", "bash", "console")
OURS = ("osworld-pipeline", "env-server", "osworld-gateway", "make", "dagster")
KNOWN = {
    "apt-get", "base64", "cat", "cd", "chmod", "cp", "createdb", "curl", "dagster-daemon", "dagster-webserver",
    "docker", "echo", "export", "git", "head", "install", "kubectl", "ls", "mkdir", "mlflow", "nvidia-smi", "pip",
    "podman", "psql", "python", "ray", "rm", "rsync", "scp", "sed", "ssh", "sudo", "sysctl", "systemctl", "tail",
    "torchrun", "ulimit", "umask", "usermod", "uv",
}  # fmt: skip
"""Programs of others, which nothing here knows the options of."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True)
class Command:
    where: str
    words: tuple[str, ...]
    is_named: bool = False
    """In the text, which may name a command without its arguments."""

    @property
    def program(self) -> str:
        return Path(self.words[0]).name


class BadCommandError(Exception):
    """The program would refuse it."""


def commands_of(name: str, page: Page) -> Iterator[Command]:
    """Commands in shell blocks whose first line starts with a program, and in inline code that starts with ours."""
    for block in page.blocks:
        if block.language in SHELL and not {"output", "text"} & set(block.marks):
            lines = list(_simple_lines(_joined(block.text)))
            found = [Command(f"{name}:{block.line}", words) for line in lines for words in split(line)]
            if any(_is_program(command.words[0]) for command in found[:1]):
                yield from found
    for line, text in page.spans:
        if text.partition(" ")[0] in OURS and " " in text:
            for words in split(text):
                yield Command(f"{name}:{line}", words, is_named=True)


def split(line: str) -> Iterator[tuple[str, ...]]:
    """The simple commands of a line, without assignments before them, comments, redirections and the brackets of
    optional words; `a|b` gives two commands."""
    line = re.sub(r"\s\[([a-z][a-z ]*)\]", "", line).replace("$(", " ").replace("...", "")
    line = re.sub(r"(?<=\s)\[(--[^\]]*)\]", r"\1", line)
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    simple: list[str] = []
    for word in [*words, ";"]:
        if word in ("|", "&&", "||", ";", "&"):
            while simple and _ASSIGNMENT.match(simple[0]):
                simple.pop(0)
            if simple:
                yield from itertools.product(*(_alternatives(word) for word in simple))
            simple = []
        elif word.endswith(";"):
            simple.append(word.rstrip(";"))
        else:
            simple.append(word)


def check(command: Command) -> None:
    """
    Raises:
        BadCommandError: there is no such command or option, or a word too many or too few.
    """
    arguments = list(_without_redirections(command.words[1:]))
    if command.program == "osworld-pipeline":
        _check_click(_pipeline(), arguments, is_named=command.is_named)
    elif command.program == "dagster":
        _check_click(_dagster(), arguments, is_named=command.is_named)
    elif command.program == "env-server":
        _check_env_server(arguments)
    elif command.program == "osworld-gateway":
        _check_argparse(make_gateway_parser(), arguments)
    elif command.program == "make":
        _check_make(arguments)
    elif "/" in command.words[0] and not command.words[0].startswith((".venv/", "/", "~")):
        if not (ROOT / command.words[0]).exists():
            raise BadCommandError(f"there is no {command.words[0]}")
    elif command.program not in KNOWN:
        raise BadCommandError(f"{command.program} is no program that this test knows")


def _is_program(word: str) -> bool:
    return Path(word).name in (*OURS, *KNOWN) or (ROOT / word).is_file()


def _joined(text: str) -> list[str]:
    """The lines; a line that ends in a backslash continues, and so does a line before an indented option."""
    return re.sub(r"(\\\n\s*|\n\s+(?=\[?--))", " ", text).splitlines()


def _simple_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines without here-documents, definitions of functions and calls of these functions."""
    end, functions = "", set[str]()
    for line in lines:
        if end:
            end = "" if line == end else end
            continue
        if defined := re.match(r"(\w+)\(\) \{", line):
            functions.add(defined[1])
        elif line.partition(" ")[0] not in functions:
            yield re.sub(r"<<\s*'?\w+'?", "", line)
        if opened := re.search(r"<<\s*'?(\w+)'?", line):
            end = opened[1]


def _alternatives(word: str) -> list[str]:
    if "|" not in word or re.search(r"[\s()\']", word):
        return [word]
    return word.split("|")


def _without_redirections(words: Sequence[str]) -> Iterator[str]:
    is_target = False
    for word in words:
        if is_target:
            is_target = False
        elif word in (">", ">>", "<", "2>"):
            is_target = True
        elif not word.startswith((">", "2>")):
            yield word


@cache
def _pipeline() -> click.Command:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Typer itself, about Click
        import typer

        from osworld_pipeline.cli import app
    return typer.main.get_command(app)


@cache
def _dagster() -> click.Command:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dagster's own
        from dagster._cli import create_dagster_cli
    return create_dagster_cli()


def _check_click(command: click.Command, words: list[str], *, is_named: bool) -> None:
    context = click.Context(command, info_name=command.name)
    while isinstance(command, click.Group):
        if not words or words[0].startswith("-"):
            alone = {name for option in command.get_params(context) for name in option.opts}
            if not words or (len(words) == 1 and words[0] in alone):
                return
            raise BadCommandError(f"{words[0]} is no command")
        name = words.pop(0)
        below = command.get_command(context, name)
        if below is None:
            raise BadCommandError(f"there is no command {name}; there are {', '.join(command.list_commands(context))}")
        command, context = below, click.Context(below, info_name=name, parent=context)
    if words == ["--help"]:
        return
    try:
        values, left, _ = command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        raise BadCommandError(error.format_message()) from error
    if left:
        raise BadCommandError(f"{' '.join(left)} is too much")
    for parameter in command.params:
        given = values.get(str(parameter.name))
        if not is_named and parameter.required and (given is None or str(given) == "Sentinel.UNSET"):
            raise BadCommandError(f"{parameter.name} is missing")


def _check_env_server(words: list[str]) -> None:
    if words and words[0] in COMMANDS:
        module, _, function = COMMANDS[words[0]].partition(":")
        main = getattr(importlib.import_module(module), function)
        below = words[1:2] if words[0] == "osgym" else []
        _check_help(main, below, words[1 + len(below) :])
        return
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    _check_argparse(parser, words)


def _check_help(main, below: list[str], words: list[str]) -> None:
    """Checks against the options that the program's help names, because its parser is not accessible."""
    reported = io.StringIO()
    with contextlib.redirect_stdout(reported), contextlib.redirect_stderr(reported), contextlib.suppress(SystemExit):
        main([*below, "--help"])
    known = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", reported.getvalue()))
    if "usage:" not in reported.getvalue() or (below and f" {below[0]} " not in reported.getvalue()):
        raise BadCommandError(f"there is no command {' '.join(below)}")
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    if unknown:
        raise BadCommandError(f"there is no option {unknown[0]}; there are {', '.join(sorted(known))}")


def _check_argparse(parser: argparse.ArgumentParser, words: list[str]) -> None:
    reported = io.StringIO()
    numbers = [re.sub(r"^(N|NUMBER|PORT)$", "1", word) for word in words]
    try:
        with contextlib.redirect_stderr(reported), contextlib.redirect_stdout(reported):
            parser.parse_args(numbers)
    except SystemExit as ended:
        if ended.code:
            raise BadCommandError(reported.getvalue().strip().splitlines()[-1]) from ended


def _check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, equals, _ = word.partition("=")
        if (
            equals
            and f"$({name})" not in makefile
            and f"$(or $({name})" not in makefile
            and f"$(if $({name})" not in makefile
        ):
            raise BadCommandError(f"the Makefile asks for no {name}")
        if not equals and not re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE):
            raise BadCommandError(f"the Makefile has no target {name}")
