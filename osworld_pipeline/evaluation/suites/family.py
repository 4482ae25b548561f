"""A family of tasks: it draws the arguments of an instance and makes a scene from them on a screen of any size."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

WORDS = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grape",
    "hazel",
    "ivory",
    "jade",
    "kiwi",
    "lemon",
    "maple",
    "north",
    "olive",
    "pearl",
    "quartz",
    "river",
    "stone",
    "tiger",
)
"""The closed vocabulary: short, common, lower case, no two with the same first letter."""

HOME = "/home/user"
DESKTOP = f"{HOME}/Desktop"

BLOCK = 5
"""Every fifth instance is held out: the last one of each block."""


class Way(StrEnum):
    """How an instance of a family with a shortcut is demonstrated."""

    SHORTCUT = "shortcut"
    """The shortcut works, and so does the careful way."""
    CAREFUL = "careful"
    """Only the careful way works."""


WAYS = (Way.SHORTCUT, Way.CAREFUL, Way.SHORTCUT, Way.CAREFUL, Way.CAREFUL)
"""Ways of the instances of a block."""

FRAME_HEIGHT = 24
"""Title bar and borders of a decorated window in pixels, with a margin."""

Arguments = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True)
class Rectangle:
    x: int
    y: int
    width: int
    height: int

    @property
    def center(self) -> list[int]:
        return [self.x + self.width // 2, self.y + self.height // 2]

    @property
    def geometry(self) -> str:
        """The rectangle in the format of X programs."""
        return f"{self.width}x{self.height}+{self.x}+{self.y}"


@dataclass(frozen=True, kw_only=True)
class Screen:
    """Positions and sizes in pixels. Arguments of instances name cells of a coarse grid, never pixels, so that an
    instance is the same task on every screen."""

    width: int
    height: int

    @property
    def scale(self) -> float:
        """1 on the smallest supported screen (512x320); at most 2 on large screens."""
        return max(1.0, min(self.width / 512, self.height / 320, 2.0))

    def scaled(self, pixels: int) -> int:
        return round(pixels * self.scale)

    def in_cell(
        self, cell: int, *, columns: int, rows: int, width: int, height: int, frame_height: int = 0
    ) -> Rectangle:
        """A rectangle in the middle of a cell, counted row by row from the top left; `frame_height` is the height that
        the window manager adds."""
        row, column = divmod(cell, columns)
        cell_width, cell_height = self.width // columns, self.height // rows
        return Rectangle(
            x=column * cell_width + (cell_width - width) // 2,
            y=row * cell_height + (cell_height - height - frame_height) // 2,
            width=width,
            height=height,
        )


@dataclass(frozen=True, kw_only=True)
class OracleStep:
    """One step of the scripted solution."""

    description: str
    """Text of the `Action:` line."""
    arguments: Mapping[str, Any]
    """Arguments of the `computer_use` tool; coordinates are pixels of the screen."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One instance: the parts of OSWorld's task file, and its solution."""

    instruction: str
    config: tuple[Mapping[str, Any], ...]
    evaluator: Mapping[str, Any]
    oracle: tuple[OracleStep, ...]
    other_way: tuple[OracleStep, ...] = ()
    """The other way in a family with a shortcut: the careful way if the oracle takes the shortcut; else the shortcut,
    which fails."""


@dataclass(frozen=True, kw_only=True)
class Family:
    name: str
    domain: str
    """OSWorld's folder and first entry of `related_apps`."""
    draw: Callable[[random.Random], Arguments]
    make_scene: Callable[[Arguments, Screen], Scene]
    has_shortcut: bool = False
    """If true, the arguments of an instance end with its Way."""

    def instance_arguments(self, *, seed: int, num_instances: int) -> list[Arguments]:
        """Arguments of the instances 0..n-1, mutually distinct; a longer list begins with a shorter one.

        Raises:
            ValueError: the family does not have that many instances.
        """
        rng = random.Random(f"desktop-basics/{self.name}/{seed}")
        seen: dict[Arguments, None] = {}
        num_draws = 0
        while len(seen) < num_instances:
            if num_draws > 100 * num_instances + 10_000:
                raise ValueError(f"family {self.name} has only about {len(seen)} instances, not {num_instances}")
            seen.setdefault(self.draw(rng))
            num_draws += 1
        if not self.has_shortcut:
            return list(seen)
        return [(*arguments, WAYS[index % BLOCK]) for index, arguments in enumerate(seen)]


def draw_two_words(rng: random.Random) -> Arguments:
    return tuple(rng.sample(WORDS, 2))


# Oracle steps


def click(description: str, point: list[int]) -> OracleStep:
    return OracleStep(description=description, arguments={"action": "left_click", "coordinate": point})


def type_text(description: str, text: str) -> OracleStep:
    return OracleStep(description=description, arguments={"action": "type", "text": text})


def press(description: str, *keys: str) -> OracleStep:
    return OracleStep(description=description, arguments={"action": "key", "keys": list(keys)})


DONE = OracleStep(description="Done", arguments={"action": "terminate", "status": "success"})
FAIL = OracleStep(description="Not possible", arguments={"action": "terminate", "status": "failure"})
