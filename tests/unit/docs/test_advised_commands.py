"""Every command that a message or a page of the product advises can be pasted: it is made by `shown_commands`, its
program accepts it, and it is run if that is cheap."""

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_lines import BadCommandError, Command, check

from osworld_pipeline.domain import remedies
from osworld_pipeline.domain.python_text import parse_python
from osworld_pipeline.domain.remedies import DEBIAN_PARTS, ENVIRONMENTS, EXTRAS, IN_CHECKOUT, how_to_set_up
from osworld_pipeline.domain.shown_commands import ENV_SERVER, PIPELINE, pipeline_line, shell_line
from osworld_pipeline.domain.state import StateDir

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("osworld_pipeline", "assets", "jobs", "resources", "env_server")
SHOWN = "osworld_pipeline/domain/shown_commands.py"
PAGES = {
    "osworld_pipeline/tables/questions/cookbook.py",
    "osworld_pipeline/recipes/describe.py",
    "resources/describe.py",
}
"""They write pages of the documentation, whose commands test_commands.py reads."""
TARGETS = "|".join(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OURS = re.compile(
    rf"\b{PIPELINE} (?:--)?[a-z]|\b{ENV_SERVER} (?!ready|osgym)(?:--)?[a-z]|\bmake (?:{TARGETS})\b"
    r"|\bdagster (?:dev|job) "
)
IN_SQL = "osworld_pipeline/tables/live_files.py"
"""DuckDB makes that command, in the view that finds the manifest damaged."""
TEMPLATE_CALL = re.compile(r"\{\{ command\((?P<words>[^}]*)\) \}\}")
RECIPE = ["--recipe", "demo", "--set", "agent.max_turns=4", "--smoke"]
"""What the options stand for that choose a recipe."""
NOT_SHIPPED = re.compile(
    r"\bscripts/|repository'?s? root|\bdocs/[\w/-]+\.md|\bdeploy/|\bMakefile\b|\.venv\b|\btests/", re.IGNORECASE
)
"""What only a checkout has."""
REMEDIES = "osworld_pipeline/domain/remedies.py"
"""It asks whether this is a checkout."""
STANDS_FOR = "1"
"""A word that is known only when the command is made."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), parse_python(path.read_text())


def docstrings(tree: ast.Module) -> set[int]:
    """Lines of a string that is a statement by itself, as docstrings are, or of the name of an argument parser."""
    found: set[int] = set()
    for node in ast.walk(tree):
        is_program = isinstance(node, ast.keyword) and node.arg == "prog"
        if is_program or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def words_of(nodes: list[ast.expr]) -> list[str]:
    return [word for node in nodes for word in _words(node)]


def _words(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else STANDS_FOR for part in node.values)]
    if isinstance(node, ast.Starred):
        return RECIPE if "options" in ast.unparse(node) else []
    return {"PIPELINE": [PIPELINE], "ENV_SERVER": [ENV_SERVER]}.get(ast.unparse(node), [STANDS_FOR])


def advised() -> Iterator[Command]:
    """Advised commands, as far as the source shows them: values known only later are STANDS_FOR."""
    for name, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or name == SHOWN:
                continue
            called = ast.unparse(node.func)
            if called == "shell_line":
                words = words_of(node.args)
            elif called == "pipeline_line":
                words = [PIPELINE, *words_of(node.args[1:]), "--state", STANDS_FOR]
            else:
                continue
            yield Command(f"{name}:{node.lineno}", tuple(words))
    for path in sorted((ROOT / "osworld_pipeline").rglob("*.jinja")):
        for call in TEMPLATE_CALL.finditer(path.read_text()):
            tree = ast.parse(f"command({call['words'].replace('~', '+')})", mode="eval")
            assert isinstance(tree.body, ast.Call)
            yield Command(path.name, (PIPELINE, *words_of(tree.body.args), "--state", STANDS_FOR))


def test_every_advised_command_is_accepted_by_its_program() -> None:
    found = list(advised())
    assert len(found) > 40
    wrong = []
    for command in found:
        if command.program == STANDS_FOR or len(command.words) == 1 or command.words[0] == "ray":
            continue
        try:
            check(command)
        except BadCommandError as error:
            wrong.append(f"{command.where}: {shlex.join(command.words)}: {error}")
    assert wrong == []


def test_no_message_writes_a_command_by_hand() -> None:
    """Such a command would lack its state, recipe and settings, and its words would be unquoted."""
    wrong = []
    for name, tree in sources():
        if name in PAGES or name == IN_SQL:
            continue
        ignored = docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno not in ignored:
                wrong += [f"{name}:{node.lineno}: {node.value}" for _ in OURS.findall(node.value)]
    for path in sorted((ROOT / "osworld_pipeline").rglob("*.jinja")):
        wrong += [f"{path.name}: {line}" for line in path.read_text().splitlines() if f"<code>{PIPELINE} " in line]
    assert wrong == []


def test_no_message_names_what_a_wheel_does_not_have() -> None:
    wrong = []
    for name, tree in sources():
        if name == REMEDIES or name.endswith("/describe.py"):
            continue
        ignored = docstrings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.lineno not in ignored:
                wrong += [f"{name}:{node.lineno}: {node.value}" for _ in NOT_SHIPPED.findall(node.value)]
    assert wrong == []


def test_every_part_that_a_message_advises_to_set_up_is_a_known_part() -> None:
    known = {*DEBIAN_PARTS, *ENVIRONMENTS, *IN_CHECKOUT, "project", "python", "uv"}
    named = [
        (name, node.lineno, word)
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "how_to_set_up"
        for word in words_of(node.args[:1])
    ]
    assert len(named) > 20
    assert [each for each in named if each[2] not in {*known, STANDS_FOR}] == []


def test_in_a_checkout_packages_are_set_up_by_its_script_and_elsewhere_by_the_installer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert how_to_set_up("train") == f"{ROOT}/scripts/setup python"
    monkeypatch.setattr(remedies, "checkout", lambda: None)
    for extra in EXTRAS:
        *installer, wanted = shlex.split(how_to_set_up(extra))
        assert (installer[-1] in ("install", sys.executable), wanted) == (True, f"osworld-pipeline[{extra}]")
    assert "scripts" not in how_to_set_up("python")


def test_a_word_with_special_characters_reaches_the_program_whole(tmp_path: Path) -> None:
    line = pipeline_line(StateDir(tmp_path / "my state"), "report", "--set", "evaluation.seeds=[0, 1]")
    program, *words = shlex.split(line)
    assert Path(program).name == PIPELINE
    assert words == ["report", "--set", "evaluation.seeds=[0, 1]", "--state", f"{tmp_path}/my state"]


def test_a_program_that_the_shell_does_not_find_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (program, option) = shlex.split(shell_line(PIPELINE, "--version"))
    assert Path(program).is_file()
    assert (Path(program).name, option) == (PIPELINE, "--version")
    assert shell_line("make", "dev") == "make dev", "what is not ours is left to the shell"
