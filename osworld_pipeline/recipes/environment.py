"""Slime-OSWorld's environment variables, under its own names: which recipe key each fills, and what it may hold.

Nothing here reads the environment: the program that starts a run passes a mapping, once. A key that the recipe's file
gives wins over the environment, and the environment over the schema's default.
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
    """Of the recipe; None for one that fills none."""
    kind: str
    """What it holds, in words."""
    parse: Callable[[str], Any]
    """Raises ValueError."""
    meaning: str


VARIABLES = (
    Variable(
        name="OSWORLD_SERVER_URL",
        key="desktop.server_urls",
        kind="URLs, comma-separated",
        parse=_urls,
        meaning="Env servers, used in turn.",
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
        meaning="Raw task reward from which an episode or a row is a success.",
    ),
    Variable(
        name="OSWORLD_MAX_TURNS",
        key="agent.max_turns",
        kind="whole number",
        parse=_whole_number,
        meaning="Step budget of a training episode; evaluation.max_turns is a recipe's own affair.",
    ),
    Variable(
        name="OSWORLD_SCREEN_DIFF_THRESHOLD",
        key="reward.screen_diff_threshold",
        kind="number",
        parse=_number,
        meaning="From where a screen counts as changed.",
    ),
    Variable(
        name="OSWORLD_TIMEOUT",
        key="gspo.episode_timeout_s",
        kind="seconds",
        parse=_number,
        meaning="Of an episode.",
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
        meaning="Rewards told with all their parts, of each update.",
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
        meaning="Of one request to an env server.",
    ),
    Variable(
        name="OSWORLD_OBS_KEEP_FULL_TURNS",
        key="agent.window_screenshots",
        kind="whole number",
        parse=_whole_number,
        meaning="Turns shown whole in `window` mode; in `append` mode every turn is, and it changes nothing.",
    ),
    Variable(
        name="OSWORLD_TRAIN_TRUNCATE_TURNS",
        key=None,
        kind="whole number",
        parse=_whole_number,
        meaning="Nothing that was sampled is cut off in training, so it only bounds what may be sampled: fewer turns "
        "than agent.max_turns are refused in `append` mode, where an episode is one sequence.",
    ),
)
TRUNCATE_TURNS = VARIABLES[-1].name


def read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Those that are set and not empty, as values by name.

    Raises:
        RecipeError: one does not hold what it should; names it.
    """
    found: dict[str, Any] = {}
    for variable in VARIABLES:
        text = environ.get(variable.name, "").strip()
        if text:
            try:
                found[variable.name] = variable.parse(text)
            except ValueError as error:
                raise RecipeError(f"{variable.name} is '{text}', which is no {variable.kind}") from error
    return found


def own_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Of a whole environment only what is read here, to be passed on."""
    return {variable.name: environ[variable.name] for variable in VARIABLES if variable.name in environ}


def refuse_truncation(recipe: "Recipe", values: Mapping[str, Any]) -> None:
    """`values`: of read_variables.

    Raises:
        RecipeError: training sequences would have to be cut.
    """
    limit = values.get(TRUNCATE_TURNS)
    if limit is not None and recipe.agent.context_mode == "append" and recipe.agent.max_turns > limit:
        raise RecipeError(
            f"{TRUNCATE_TURNS} is {limit} and agent.max_turns is {recipe.agent.max_turns}: what was sampled is trained "
            f'on whole, so lower agent.max_turns, set agent.context_mode = "window", or unset the variable'
        )
