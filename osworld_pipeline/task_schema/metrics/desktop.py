"""Metrics of OSWorld's `os` tasks, on the output of a desktop's own tools."""

import ast
from collections.abc import Mapping
from typing import Any

from osworld_pipeline.task_schema.examples import Names, output_of
from osworld_pipeline.task_schema.spec import metric


@metric(
    "text", None,
    example=({"type": "vm_command_line", "command": "gsettings get org.gnome.desktop.interface text-scaling-factor",
              "shell": True},),
)  # fmt: skip
def check_text_enlarged(scaling_factor: str) -> float:
    """1 if a number, the text scaling factor of the desktop, is above 1.

    ValueError if the desktop reports no factor: it cannot run the task, which is not the policy's failure."""
    return float(float(scaling_factor) > 1.0)


@metric("text", None, example=(output_of("timedatectl", "status"),))
def is_utc_0(timedatectl_output: str) -> float:
    """1 if the fourth line of `timedatectl status` names a zone without offset.

    IndexError where there is no such report."""
    return float(timedatectl_output.split("\n")[3].endswith("+0000)"))


@metric(
    "text", "rules", example=(output_of("gsettings", "get", "org.gnome.shell", "favorite-apps"),
                              {"expected": ["firefox.desktop", "thunderbird.desktop"]}),
)  # fmt: skip
def check_gnome_favorite_apps(apps: str, *, expected: Names) -> float:
    """1 if a list printed by gsettings has exactly these names, in any order.

    SyntaxError if nothing was printed."""
    found = ast.literal_eval(apps.strip().removeprefix("@as").strip())
    return float(len(found) == len(expected) and set(found) == set(expected))


@metric(
    "tree", "rules",
    example=({"type": "list_directory", "path": "/home/user/photos"}, {"expected": ["sea.jpg", "wood.jpg"]}),
)  # fmt: skip
def check_moved_jpgs(tree: Mapping[str, Any] | None, *, expected: Names) -> float:
    """1 if the entries of a folder have exactly these names, in any order."""
    if tree is None:
        return 0.0
    found = [node["name"] for node in tree["children"]]
    return float(len(found) == len(expected) and set(found) == set(expected))
