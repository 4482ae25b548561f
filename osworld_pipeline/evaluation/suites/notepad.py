"""Tasks with Windows programs in four levels, as in the Windows example (docs/migration.md): Notepad with instructions
for every step, Notepad with a named file, a command line, and several steps. Encoding-aware checkers give partial
scores.

The same families run on Windows, and on local desktops with Debian's Wine, where only PowerShell is missing. Their
domains are the levels."""

import random
from collections.abc import Callable, Sequence

from osworld_pipeline.evaluation.suites.family import (
    DONE,
    WORDS,
    Arguments,
    Family,
    OracleStep,
    Scene,
    Screen,
    draw_two_words,
    press,
    type_text,
)
from osworld_pipeline.evaluation.suites.verbs import Evaluator, Verb, all_of

ON_WINE: tuple[Verb, ...] = (
    {"type": "execute", "parameters": {"command": ["windows-program", "--stay"]}},
    # The first window takes seconds to open, later ones less than one: after this warm-up the next screenshot shows the
    # agent's window.
    {"type": "execute", "parameters": {"command": ["windows-program", "--warm-up"]}},
)
"""Set-up of a desktop with Wine; Windows itself needs none."""
_RULE = "rule"


def open_run(program: str) -> tuple[OracleStep, ...]:
    return (press("Open the Run dialog", "win", "r"), type_text(f"Start {program}", f"{program}\n"))


def save_as(path: str) -> tuple[OracleStep, ...]:
    return (press("Save", "ctrl", "s"), type_text(f"Name the file {path}", f"{path}\n"))


def _in_notepad(text: str, path: str) -> tuple[OracleStep, ...]:
    return (*open_run("notepad"), type_text("Type the text", text), *save_as(path))


def _at_prompt(*commands: str) -> tuple[OracleStep, ...]:
    typed = [type_text(f"Run {command.split()[0]}", f"{command}\n") for command in commands]
    return (*open_run("cmd"), *typed)


def graded(path: str, checker: str, expected: str | Sequence[str] | None = None) -> Evaluator:
    """An evaluator of one file by one checker; `expected` is a text, or the names that it searches for."""
    rules = {} if expected is None else {"expected": expected if isinstance(expected, str) else list(expected)}
    return {
        "func": f"windows_{checker}",
        "result": {"type": "vm_file", "path": path, "dest": path.rpartition("\\")[2]},
        "expected": {"type": _RULE, "rules": rules},
    }


Made = tuple[str, Evaluator, tuple[OracleStep, ...]]
"""Instruction, evaluator, and the oracle's steps before DONE."""


def _sentence(arguments: Arguments) -> Made:
    first, second = arguments
    text, path = f"The {first} is near the {second}.", "C:\\output.txt"
    instruction = (
        f"Write this sentence with Notepad: {text} First press Win+R, type notepad and press Enter. Then type the "
        f"sentence, press Ctrl+S, type {path} as the name and press Enter. Then you are done."
    )
    return instruction, graded(path, "exact_match", text), _in_notepad(text, path)


def _named_note(arguments: Arguments) -> Made:
    first, second, name = arguments
    text, path = f"{first} {second}", f"C:\\{name}.txt"
    return f"Save the text {text} as {path} with Notepad.", graded(path, "exact_match", text), _in_notepad(text, path)


def _lines(arguments: Arguments) -> Made:
    *words, name = map(str, arguments)
    text, path = "\n".join(words), f"C:\\{name}.txt"
    listed = f"{words[0]}, {words[1]} and {words[2]}"
    instruction = f"Save a list as {path} with Notepad, each word on a line of its own: {listed}."
    return instruction, graded(path, "exact_match", text), _in_notepad(text, path)


def _echo(arguments: Arguments) -> Made:
    word, name = arguments
    path = f"C:\\{name}.txt"
    return (
        f"Write the word {word} to {path} from a command prompt (cmd).",
        graded(path, "exact_match", str(word)),
        _at_prompt(f"echo {word}> {path}"),
    )


def _listing(arguments: Arguments) -> Made:
    name, encoding = arguments
    path = f"C:\\{name}.txt"
    how = "as Unicode (cmd /u)" if encoding == "/u" else "with dir"
    return (
        f"Write the listing of C:\\ to {path} from a command prompt, {how}.",
        graded(path, "names_listed", ["windows", "users", "program files"]),
        _at_prompt(f"cmd {encoding} /c dir C:\\ > {path}"),
    )


def _product(arguments: Arguments) -> Made:
    left, right, name = arguments
    path = f"C:\\{name}.txt"
    return (
        f"Let a command prompt multiply {left} by {right} (set /a) and write the result to {path}.",
        graded(path, "exact_match", str(int(left) * int(right))),
        _at_prompt(f"cmd /c set /a {left}*{right} > {path}"),
    )


def _numbers(arguments: Arguments) -> Made:
    last, name = arguments
    path = f"C:\\{name}.txt"
    return (
        f"Write the numbers from 1 to {last} to {path} from a command prompt, one on a line.",
        graded(path, "exact_match", "\n".join(str(number + 1) for number in range(int(last)))),
        _at_prompt("\n".join(f"echo {number + 1} >> {path}" for number in range(int(last)))),
    )


def _computer(arguments: Arguments) -> Made:
    (name,) = arguments
    path = f"C:\\{name}.txt"
    return (
        f"Write the name of this computer to {path} from a command prompt.",
        graded(path, "non_empty"),
        _at_prompt(f"hostname > {path}"),
    )


def _note_in_folder(arguments: Arguments) -> Made:
    folder, word, name = arguments
    path = f"C:\\{folder}\\{name}.txt"
    return (
        f"Make the folder C:\\{folder} from a command prompt, then save the text {word} in it as {name}.txt with "
        "Notepad.",
        graded(path, "exact_match", str(word)),
        (*_at_prompt(f"mkdir C:\\{folder}"), *_in_notepad(str(word), path)),
    )


def _two_notes(arguments: Arguments) -> Made:
    first, second = arguments
    paths = f"C:\\{first}.txt", f"C:\\{second}.txt"
    return (
        f"With Notepad, save the text {second} as {paths[0]} and the text {first} as {paths[1]}.",
        all_of(graded(paths[0], "exact_match", str(second)), graded(paths[1], "exact_match", str(first))),
        (*_in_notepad(str(second), paths[0]), *_in_notepad(str(first), paths[1])),
    )


def _append(arguments: Arguments) -> Made:
    first, second, name = arguments
    path = f"C:\\{name}.txt"
    return (
        f"From a command prompt, write {first} to the new file {path}, then append {second} to it.",
        graded(path, "has_all", [str(first), str(second)]),
        _at_prompt(f"echo {first} > {path}", f"echo {second} >> {path}"),
    )


def _powershell_date(arguments: Arguments) -> Made:
    (name,) = arguments
    path = f"C:\\{name}.txt"
    return (
        f"Write today's date as 2026-11-22 is written to {path} with PowerShell.",
        graded(path, "date_format"),
        (*open_run("powershell"), type_text("Write the date", f"Get-Date -Format yyyy-MM-dd > {path}\n")),
    )


def _powershell_content(arguments: Arguments) -> Made:
    word, name = arguments
    path = f"C:\\{name}.txt"
    return (
        f"Write the word {word} to {path} with PowerShell.",
        graded(path, "exact_match", str(word)),
        (*open_run("powershell"), type_text("Write the word", f"Set-Content -Path '{path}' -Value '{word}'\n")),
    )


def _draw_words(count: int) -> Callable[[random.Random], Arguments]:
    return lambda rng: tuple(rng.sample(WORDS, count))


def _draw_listing(rng: random.Random) -> Arguments:
    return (*rng.sample(WORDS, 1), rng.choice(("/a", "/u")))


def _draw_product(rng: random.Random) -> Arguments:
    return (rng.randrange(3, 20), rng.randrange(3, 20), *rng.sample(WORDS, 1))


def _draw_numbers(rng: random.Random) -> Arguments:
    return (rng.randrange(3, 10), *rng.sample(WORDS, 1))


_Draw = Callable[[random.Random], Arguments]
_Make = Callable[[Arguments], Made]
_LEVELS: tuple[tuple[str, str, _Draw, _Make], ...] = (
    ("notepad_sentence", "windows_level1", draw_two_words, _sentence),
    ("notepad_named", "windows_level2", _draw_words(3), _named_note),
    ("notepad_lines", "windows_level2", _draw_words(4), _lines),
    ("cmd_echo", "windows_level3", draw_two_words, _echo),
    ("cmd_listing", "windows_level3", _draw_listing, _listing),
    ("cmd_product", "windows_level3", _draw_product, _product),
    ("cmd_numbers", "windows_level3", _draw_numbers, _numbers),
    ("cmd_computer", "windows_level3", _draw_words(1), _computer),
    ("note_in_folder", "windows_level4", _draw_words(3), _note_in_folder),
    ("two_notes", "windows_level4", draw_two_words, _two_notes),
    ("cmd_append", "windows_level4", _draw_words(3), _append),
)
_POWERSHELL: tuple[tuple[str, str, _Draw, _Make], ...] = (
    ("powershell_date", "windows_level3", _draw_words(1), _powershell_date),
    ("powershell_content", "windows_level3", draw_two_words, _powershell_content),
)


def _family(name: str, domain: str, draw: _Draw, make: _Make, config: tuple[Verb, ...]) -> Family:
    def make_scene(arguments: Arguments, screen: Screen) -> Scene:
        instruction, evaluator, steps = make(arguments)
        return Scene(instruction=instruction, config=config, evaluator=evaluator, oracle=(*steps, DONE))

    return Family(name=name, domain=domain, draw=draw, make_scene=make_scene)


WINDOWS_FAMILIES = tuple(_family(*row, ()) for row in (*_LEVELS, *_POWERSHELL))
WINE_FAMILIES = tuple(_family(*row, ON_WINE) for row in _LEVELS)
