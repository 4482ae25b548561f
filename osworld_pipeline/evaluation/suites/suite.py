"""Build the suite of a recipe, for the desktop's own programs or for Windows programs. Instance k of a family is the
same task, in the same split, for any requested numbers: every fifth instance is held out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import RecipeError
from osworld_pipeline.evaluation.suites import (
    dialogs,
    editor,
    file_manager,
    impossible,
    notepad,
    shortcuts,
    terminal,
    windows,
    workflows,
)
from osworld_pipeline.evaluation.suites.family import BLOCK, Arguments, Family, OracleStep, Screen

DESKTOP, SHORTCUTS, WINDOWS, WINE = "desktop_basics", "desktop_shortcuts", "windows_basics", "wine_basics"

Split = Literal["train", "heldout"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in chain(
            terminal.FAMILIES,
            editor.FAMILIES,
            file_manager.FAMILIES,
            dialogs.FAMILIES,
            windows.FAMILIES,
            workflows.FAMILIES,
            impossible.FAMILIES,
        )
    }
)
"""Families of the desktop's own suite."""
SUITES: Mapping[str, Mapping[str, Family]] = MappingProxyType(
    {
        DESKTOP: FAMILIES,
        SHORTCUTS: {family.name: family for family in shortcuts.FAMILIES},
        WINDOWS: {family.name: family for family in notepad.WINDOWS_FAMILIES},
        WINE: {family.name: family for family in notepad.WINE_FAMILIES},
    }
)


def needs_wine(suite_name: str) -> bool:
    """Whether its tasks need desktops with Wine."""
    return suite_name == WINE


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    task: Task
    family: str
    split: Split
    arguments: Arguments
    """They identify this instance in its family."""
    oracle: tuple[OracleStep, ...]
    other_way: tuple[OracleStep, ...]
    """The same as in Scene."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    train: tuple[SuiteTask, ...]
    heldout: tuple[SuiteTask, ...]

    @property
    def digest(self) -> str:
        """Digest of every task as it is run and scored, and of its split."""
        return digest_json([[item.split, item.family, item.task.config] for item in (*self.train, *self.heldout)])


def build_suite(
    name: str = DESKTOP,
    *,
    seed: int,
    families: Sequence[str] = (),
    num_train: int,
    num_heldout: int,
    screen: tuple[int, int],
) -> Suite:
    """`name`: of SUITES. `families`: names, in any order; empty for all. `screen`: (width, height) of the desktops.

    Raises:
        RecipeError: no such family, or a family does not have that many instances.
    """
    there = SUITES[name]
    unknown = sorted(set(families) - set(there))
    if unknown:
        raise RecipeError(f"suite.families: no family named '{unknown[0]}'; there are: {', '.join(there)}")
    title = name.replace("_", "-")
    train: list[SuiteTask] = []
    heldout: list[SuiteTask] = []
    for family in there.values():
        if not families or family.name in families:
            train += _tasks_of(family, "train", num_train, suite=title, seed=seed, screen=screen)
            heldout += _tasks_of(family, "heldout", num_heldout, suite=title, seed=seed, screen=screen)
    return Suite(name=title, train=tuple(train), heldout=tuple(heldout))


def _instance_indices(split: Split, count: int) -> list[int]:
    if split == "heldout":
        return [BLOCK * (index + 1) - 1 for index in range(count)]
    # Blocks of four with the held-out fifth left out.
    return [index + index // (BLOCK - 1) for index in range(count)]


def _tasks_of(
    family: Family, split: Split, count: int, *, suite: str, seed: int, screen: tuple[int, int]
) -> list[SuiteTask]:
    indices = _instance_indices(split, count)
    try:
        arguments = family.instance_arguments(seed=seed, num_instances=max(indices, default=-1) + 1)
    except ValueError as error:
        raise RecipeError(f"suite.num_{split}: {error}; ask for fewer") from error
    size = Screen(width=screen[0], height=screen[1])
    return [_suite_task(family, split, index, arguments[index], suite=suite, screen=size) for index in indices]


def _suite_task(
    family: Family, split: Split, index: int, arguments: Arguments, *, suite: str, screen: Screen
) -> SuiteTask:
    scene = family.make_scene(arguments, screen)
    config: dict[str, Any] = {
        "id": f"{suite}-{family.name}-{index:04d}",
        "snapshot": family.domain,
        "instruction": scene.instruction,
        "source": f"{suite}/{family.name}",
        "config": list(scene.config),
        "trajectory": "trajectories/",
        "related_apps": [family.domain],
        "evaluator": dict(scene.evaluator),
    }
    return SuiteTask(
        task=Task.from_config(config, domain=family.domain),
        family=family.name,
        split=split,
        arguments=arguments,
        oracle=scene.oracle,
        other_way=scene.other_way,
    )
