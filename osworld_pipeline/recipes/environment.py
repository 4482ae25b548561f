"""Slime-OSWorld's environment variables, with their original names: the recipe key that each sets, and its valid
values.

This module does not read the environment: the program that starts a run passes a mapping once. A key in the recipe's
file overrides the environment, which overrides the schema's default.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from osworld_pipeline.errors import RecipeError

if TYPE_CHECKING:
    from osworld_pipeline.recipes.schema import Recipe


def _whole_number(text: str) -> int:
    return int(text)


def _number(text: str) -> float:
    return float(text)


def _urls(text: str) -> list[str]:
    return [url.strip() for url in text.split(",") if url.strip()]


@dataclass(frozen=True, kw_only=True)
class Variable:
    name: str
    key: str | None
    """Key of the recipe; None if it sets none."""
    kind: str
    """The type of its value, in words."""
    parse: Callable[[str], Any]
    """Raises ValueError."""
    meaning: str


VARIABLES = (
    Variable(
        name="OSWORLD_SERVER_URL",
        key="desktop.server_urls",
        kind="URLs, comma-separated",
        parse=_urls,
        meaning="Env servers; an episode goes to the one with the most free desktops.",
    ),
    Variable(
        name="OSWORLD_REPLAY_BUFFER",
        key="replay.import_file",
        kind="path",
        parse=str,
        meaning="A replay file, imported as one more source.",
    ),
    Variable(
        name="OSWORLD_REPLAY_THRESHOLD",
        key="replay.threshold",
        kind="number",
        parse=_number,
        meaning="Minimum raw task reward for an episode or a row to be a success.",
    ),
    Variable(
        name="OSWORLD_MAX_TURNS",
        key="agent.max_turns",
        kind="whole number",
        parse=_whole_number,
        meaning="Step budget of a training episode; evaluation.max_turns is only set by a recipe.",
    ),
    Variable(
        name="OSWORLD_SCREEN_DIFF_THRESHOLD",
        key="reward.screen_diff_threshold",
        kind="number",
        parse=_number,
        meaning="Minimum difference for a screen to count as changed.",
    ),
    Variable(
        name="OSWORLD_TIMEOUT",
        key="gspo.episode_timeout_s",
        kind="seconds",
        parse=_number,
        meaning="Time limit of an episode.",
    ),
    Variable(
        name="OSWORLD_REWARD_ALPHA",
        key="reward.alpha",
        kind="number",
        parse=_number,
        meaning="Weight of the process score.",
    ),
    Variable(
        name="OSWORLD_REWARD_DEBUG_LIMIT",
        key="rollout.reported_rewards",
        kind="whole number",
        parse=_whole_number,
        meaning="Number of rewards of each update that are logged with all their parts.",
    ),
    Variable(
        name="OSWORLD_A11Y_MAX_LENGTH",
        key="agent.a11y_max_length",
        kind="whole number",
        parse=_whole_number,
        meaning="Characters of the accessibility tree that the model reads.",
    ),
    Variable(
        name="OSWORLD_HTTP_TIMEOUT",
        key="desktop.request_timeout_s",
        kind="seconds",
        parse=_number,
        meaning="Timeout of one request to an env server.",
    ),
    Variable(
        name="OSWORLD_OBS_KEEP_FULL_TURNS",
        key="agent.window_screenshots",
        kind="whole number",
        parse=_whole_number,
        meaning="Turns shown completely in `window` mode; no effect in `append` mode, which shows every turn.",
    ),
    Variable(
        name="OSWORLD_TRAIN_TRUNCATE_TURNS",
        key=None,
        kind="whole number",
        parse=_whole_number,
        meaning="Only checked, because training does not truncate samples: a value below agent.max_turns is refused in "
        "`append` mode, where an episode is one sequence.",
    ),
)
TRUNCATE_TURNS = VARIABLES[-1].name


def read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """The variables that are set and not empty, as values by name.

    Raises:
        RecipeError: one has an invalid value; the message names it.
    """
    found: dict[str, Any] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if text:
            try:
                found[variable.name] = variable.parse(text)
            except ValueError as error:
                raise RecipeError(f"{variable.name} is '{text}', which is invalid: expected {variable.kind}") from error
    return found


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the environment that is read here, for subprocesses."""
    return {variable.name: environ[variable.name] for variable in VARIABLES if variable.name in environ}


def refuse_truncation(recipe: "Recipe", values: Mapping[str, Any]) -> None:
    """`values`: as returned by read_variables.

    Raises:
        RecipeError: training sequences would have to be truncated.
    """
    limit = values.get(TRUNCATE_TURNS)
    if limit is not None and recipe.agent.context_mode == "append" and recipe.agent.max_turns > limit:
        raise RecipeError(
            f"{TRUNCATE_TURNS} is {limit} and agent.max_turns is {recipe.agent.max_turns}: samples are not truncated "
            f'for training, so lower agent.max_turns, set agent.context_mode = "window", or unset the variable'
        )
