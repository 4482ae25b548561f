"""Actions in normal form, as many as a dialect can express, for every dialect and coordinate space."""

from typing import Any

from hypothesis import strategies as st

from osworld_pipeline.dialects import GRAMMARS, Dialect, load_dialect
from osworld_pipeline.dialects.actions import CLICKS, normalise
from osworld_pipeline.dialects.coordinates import COORDINATE_SPACES, CoordinateSpace, limit_of
from osworld_pipeline.dialects.keys import KEY_NAMES

DIALECTS = [load_dialect(name, space) for name in GRAMMARS for space in COORDINATE_SPACES]

tricky = st.sampled_from(
    [
        *("</tool_call>", "<tool_call>", "<|im_end|>", "</s>", "```", "```json", '"', "'", "\\", "\n", "é", "🙂"),
        *(
            "\u2028",
            "\x85",
            "{",
            "}",
            "<action>",
            "</action>",
            "<done/>",
            "<fail/>",
            "&lt;",
            "&amp;",
            "&quot;",
            "&",
            "<",
        ),
        *("DONE", "\nFAIL\n", "<|action_start|>", "<|think_start|>", "<|think_end|>", " ", "(", ")", ",", "-"),
    ]
)
texts = st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=8) | tricky, min_size=1, max_size=6)
texts = texts.map("".join).filter(len)
keys = st.sampled_from(sorted(KEY_NAMES)) | st.characters(categories=("L", "N", "P", "S")).filter(
    lambda char: len(char) == 1 and char.isprintable()
)
amounts = st.integers(1, 1000)


def points(space: CoordinateSpace) -> st.SearchStrategy[list[Any]]:
    if space == "unit":
        numbers: st.SearchStrategy[Any] = st.integers(0, 10_000).map(lambda number: number / 10_000)
    else:
        numbers = st.integers(0, limit_of(space))
    return st.lists(numbers, min_size=2, max_size=2)


def singles(space: CoordinateSpace) -> dict[str, st.SearchStrategy[dict[str, Any]]]:
    """Each action, by name."""
    place = st.fixed_dictionaries({}, optional={"coordinate": points(space)})

    def with_place(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
        return st.tuples(place, st.fixed_dictionaries(fields)).map(lambda pair: {**pair[0], **pair[1]})

    found = {name: st.fixed_dictionaries({"coordinate": points(space)}) for name in (*CLICKS, "mouse_move")}
    found |= {
        "left_click_drag": st.fixed_dictionaries(
            {"end_coordinate": points(space)}, optional={"start_coordinate": points(space)}
        ),
        "mouse_down": with_place(button=st.sampled_from(["left", "right", "middle"])),
        "mouse_up": with_place(button=st.sampled_from(["left", "right", "middle"])),
        "type": st.fixed_dictionaries({"text": texts}),
        "key": st.fixed_dictionaries({"keys": st.lists(keys, min_size=1, max_size=8)}),
        "key_down": st.fixed_dictionaries({"keys": st.lists(keys, min_size=1, max_size=1)}),
        "key_up": st.fixed_dictionaries({"keys": st.lists(keys, min_size=1, max_size=1)}),
        "scroll": with_place(direction=st.sampled_from(["up", "down"]), amount=amounts),
        "hscroll": with_place(direction=st.sampled_from(["left", "right"]), amount=amounts),
        "wait": st.fixed_dictionaries({}, optional={"seconds": st.integers(0, 4000).map(lambda ms: ms / 1000)}),
        "terminate": st.fixed_dictionaries({"status": st.sampled_from(["success", "failure"])}),
    }
    return {name: strategy.map(lambda rest, name=name: {"action": name, **rest}) for name, strategy in found.items()}


def actions(dialect: Dialect) -> st.SearchStrategy[dict[str, Any]]:
    """The actions of the dialect's vocabulary, sequences included, in normal form."""
    vocabulary, space = dialect.grammar.vocabulary, dialect.coordinate_space
    named = [strategy for name, strategy in singles(space).items() if name in vocabulary.names]
    raw = st.one_of(named)
    if vocabulary.clicks_at_pointer:
        raw |= st.sampled_from(CLICKS).map(lambda name: {"action": name})
    if vocabulary.takes_sequences:
        going_on = raw.filter(lambda one: one["action"] != "terminate")
        several = st.tuples(st.lists(going_on, min_size=1, max_size=4), raw).map(lambda pair: [*pair[0], pair[1]])
        raw |= several.map(lambda found: {"action": "sequence", "actions": found})
    return raw.map(lambda one: normalise(one, space=space, vocabulary=vocabulary))
