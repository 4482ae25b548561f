"""Metrics of OSWorld's `os` tasks: over what a desktop's own tools report."""

import ast
from collections.abc import Mapping
from typing import Any

Rules = Mapping[str, Any]


def check_text_enlarged(scaling_factor: str) -> float:
    """ValueError where the desktop reports no factor: it cannot host the task, and the policy has not failed it."""
    return float(float(scaling_factor) > 1.0)


def is_utc_0(timedatectl_output: str) -> float:
    """The fourth line of `timedatectl status` names the zone. IndexError where there is no such report."""
    return float(timedatectl_output.split("\n")[3].endswith("+0000)"))


def check_gnome_favorite_apps(apps: str, rules: Rules) -> float:
    """`apps` is a list as gsettings prints it; the order does not count. SyntaxError where nothing was printed."""
    text = apps.strip().removeprefix("@as").strip()
    found, expected = ast.literal_eval(text), rules["expected"]
    return float(len(found) == len(expected) and set(found) == set(expected))


def check_moved_jpgs(tree: Mapping[str, Any] | None, rules: Rules) -> float:
    """Exactly the expected names lie in the folder; None where the folder is gone."""
    if tree is None:
        return 0.0
    found, expected = [node["name"] for node in tree["children"]], rules["expected"]
    return float(len(found) == len(expected) and set(found) == set(expected))
