"""OSWorld's set-up verbs and evaluators for the families: known programs, and checks that wait briefly."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from osworld_pipeline.evaluation.suites.family import DESKTOP, HOME, Rectangle, Screen

Verb = Mapping[str, Any]
Evaluator = Mapping[str, Any]


def run_shell(command: str) -> Verb:
    return {"type": "execute", "parameters": {"command": command, "shell": True}}


def launch(*command: str) -> Verb:
    return {"type": "launch", "parameters": {"command": list(command)}}


def wait_for_window(title: str) -> Verb:
    """Returns as soon as a window shows that title (a regular expression), at the latest after 10 s."""
    search = f"xdotool search --onlyvisible --name '{title}'"
    return run_shell(f"for i in $(seq 200); do {search} >/dev/null 2>&1 && exit 0; sleep 0.05; done; exit 1")


def press_keys(title: str, *keys: str) -> Verb:
    """Gives the focus to the window with that title (a regular expression) and presses keys, by their X names."""
    focus = f"xdotool search --onlyvisible --name '{title}' windowactivate --sync"
    # Keys in the same xdotool command would be sent to the window as synthetic events, which its program ignores.
    return run_shell(f"{focus} && xdotool key {' '.join(keys)}")


def open_terminal(screen: Screen, *, geometry: str = "", folder: str = DESKTOP) -> tuple[Verb, ...]:
    """An xterm in a folder, with the focus; maximised unless a geometry (in characters) is given."""
    place = f"-geometry {geometry}" if geometry else "-maximized"
    font_size = 14 if screen.scale < 1.5 else 18
    command = (
        f"cd {folder} && exec xterm {place} -fa Monospace -fs {font_size} -T Terminal -xrm '*allowTitleOps: false'"
    )
    return (
        {"type": "launch", "parameters": {"command": command, "shell": True}},
        wait_for_window("^Terminal$"),
    )


def open_titled_window(title: str, place: Rectangle, screen: Screen) -> tuple[Verb, ...]:
    """A plain window that shows its own title in large letters."""
    return (
        launch(
            "yad",
            f"--title={title}",
            f"--geometry={place.geometry}",
            f"--text=<span size='{screen.scaled(24) * 1000}'>{title}</span>",
            "--text-align=center",
            "--no-buttons",
        ),
        wait_for_window(f"^{title}$"),
    )


def open_entry_dialog(
    title: str, place: Rectangle, screen: Screen, *, answer_path: str, text: str = ""
) -> tuple[Verb, ...]:
    """A dialog with one text field with the initial text `text`; the answer is written to a file."""
    question = f"<span size='{screen.scaled(16) * 1000}'>Your answer:</span>"
    filled = f" --entry-text={shlex.quote(text)}" if text else ""
    command = (
        f"exec yad --entry{filled} --title={title} --geometry={place.geometry} "
        f'--text="{question}" --button=OK:0 > {answer_path}'
    )
    return (
        {"type": "launch", "parameters": {"command": command, "shell": True}},
        wait_for_window(f"^{title}$"),
    )


def holds(condition: str) -> Evaluator:
    """1 if a shell condition holds. Programs react with a delay, so it is checked repeatedly for half a second."""
    command = f"for i in 1 2 3 4 5 6; do if {condition}; then echo yes; exit 0; fi; sleep 0.1; done; echo no"
    return {
        "func": "exact_match",
        "result": {"type": "vm_command_line", "command": command, "shell": True},
        "expected": {"type": "rule", "rules": {"expected": "yes\n"}},
    }


def file_holds_text(path: str, text: str) -> Evaluator:
    """1 if a file holds that text, ignoring white space around it; inside, any run of white space counts as one blank.
    The reference is written after the episode has ended, so that the policy cannot copy it."""
    reference = f"{HOME}/.reference.txt"
    return {
        "postconfig": [
            {"type": "sleep", "parameters": {"seconds": 0.3}},
            run_shell(f"printf '%s\\n' '{text}' > {reference}"),
        ],
        "func": "compare_text_file",
        "result": {"type": "vm_file", "path": path, "dest": "result.txt"},
        "expected": {"type": "vm_file", "path": reference, "dest": "reference.txt"},
        "options": {"ignore_blanks": True},
    }


def window_list(*, include: Sequence[str], exclude: Sequence[str]) -> Evaluator:
    """1 if the list of open windows names all of `include` and none of `exclude`."""
    return {
        "postconfig": [{"type": "sleep", "parameters": {"seconds": 0.3}}],
        "func": "check_include_exclude",
        "result": {"type": "vm_command_line", "command": "wmctrl -l", "shell": True},
        "expected": {"type": "rule", "rules": {"include": list(include), "exclude": list(exclude)}},
    }


def all_of(*evaluators: Evaluator) -> Evaluator:
    """1 if all of them score 1 (OSWorld's lists with `conj`)."""
    postconfig = [verb for evaluator in evaluators for verb in evaluator.get("postconfig", [])]
    return {
        **({"postconfig": postconfig} if postconfig else {}),
        "func": [evaluator["func"] for evaluator in evaluators],
        "conj": "and",
        "result": [evaluator["result"] for evaluator in evaluators],
        "expected": [evaluator["expected"] for evaluator in evaluators],
        "options": [evaluator.get("options", {}) for evaluator in evaluators],
    }
