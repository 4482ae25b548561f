"""Every command line in the documentation is accepted by its program."""

from collections import Counter

import pytest
from check_links import Page
from command_lines import OURS, BadCommandError, Command, check, commands_of, split


def test_every_documented_command_line_is_accepted(pages: dict[str, Page]) -> None:
    wrong = []
    for name, page in pages.items():
        for command in commands_of(name, page):
            try:
                check(command)
            except BadCommandError as error:
                wrong.append(f"{command.where}: {' '.join(command.words)}: {error}")
    assert wrong == []


def test_the_documentation_has_several_command_lines_of_each_of_our_programs(pages: dict[str, Page]) -> None:
    found = Counter(command.program for name, page in pages.items() for command in commands_of(name, page))
    assert found["osworld-pipeline"] > 60
    assert all(found[program] > 1 for program in OURS), found


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("osworld-pipeline evaluate --checkpiont x", "checkpiont"),
        ("osworld-pipeline evaluat", "there is no command evaluat"),
        ("osworld-pipeline lineage", "thing is missing"),
        ("osworld-pipeline report here there", "here there is too much"),
        ("osworld-pipeline evaluate --suite", "requires an argument"),
        ("osworld-pipeline checkpoint ad x", "there is no command ad"),
        ("env-server --replica-count 3", "unrecognized arguments: --replica-count"),
        ("env-server --replicas many", "invalid int value"),
        ("env-server doctor --jsn", "there is no option --jsn"),
        ("env-server osgym begin --config x", "there is no command begin"),
        ("osworld-gateway --quotas 3", "unrecognized arguments: --quotas"),
        ("make dmo", "no target dmo"),
        ("make bench-env SLIM=x", "asks for no SLIM"),
        ("scripts/set-up python", "there is no scripts/set-up"),
        ("dagster job lunch -j train", "there is no command lunch"),
        ("osworld-pipline demo", "no program that this test knows"),
    ],
)
def test_a_wrong_command_line_is_refused(line: str, reported: str) -> None:
    (words,) = split(line)
    with pytest.raises(BadCommandError, match=reported):
        check(Command("here", words))


def test_a_line_is_read_as_a_shell_reads_it() -> None:
    line = 'A=1 B="$(cat x)" env-server --host 10.0.0.5 & osworld-pipeline query "SELECT 1; -- | x" > out  # a | b'
    assert list(split(line)) == [
        ("env-server", "--host", "10.0.0.5"),
        ("osworld-pipeline", "query", "SELECT 1; -- | x", ">", "out"),
    ]


def test_alternatives_become_separate_commands_and_brackets_are_optional() -> None:
    assert list(split("osworld-pipeline export a|b OUT [--state DIR] [filters]")) == [
        ("osworld-pipeline", "export", "a", "OUT", "--state", "DIR"),
        ("osworld-pipeline", "export", "b", "OUT", "--state", "DIR"),
    ]
