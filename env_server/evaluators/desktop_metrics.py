"""Metrics of OSWorld's `os` tasks, on the output of a desktop's own tools."""

import ast
from collections.abc import Mapping
from typing import Any

Rules = Mapping[str, Any]


def check_text_enlarged(scaling_factor: str) -> float:
    """ValueError if the desktop reports no factor: it cannot run the task, which is not the policy's failure."""
    return float(float(scaling_factor) > 1.0)


def is_utc_0(timedatectl_output: str) -> float:
    """The fourth line of `timedatectl status` names the zone. IndexError where there is no such report."""
    return float(timedatectl_output.split("\n")[3].endswith("+0000)"))


def check_gnome_favorite_apps(apps: str, rules: Rules) -> float:
    """`apps` is a list as gsettings prints it; the order is ignored. SyntaxError if nothing was printed."""
    text = apps.strip().removeprefix("@as").strip()
    found, expected = ast.literal_eval(text), rules["expected"]
    return float(len(found) == len(expected) and set(found) == set(expected))


def check_moved_jpgs(tree: Mapping[str, Any] | None, rules: Rules) -> float:
    """The folder contains exactly the expected names; None means that the folder is missing."""
    if tree is None:
        return 0.0
    found, expected = [node["name"] for node in tree["children"]], rules["expected"]
    return float(len(found) == len(expected) and set(found) == set(expected))
