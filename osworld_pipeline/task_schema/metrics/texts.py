"""Metrics over values: strings, lists and numbers against a rule."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from osworld_pipeline.task_schema.examples import COMMAND, output_of
from osworld_pipeline.task_schema.spec import Key, Rule, metric


@metric("anything", "rules", example=(COMMAND, {"expected": "milk\n"}))
def exact_match(result: Any, *, expected: Annotated[Any, Rule("the value", "anything", may_be_empty=True)]) -> float:
    """1 if the actual value equals the expected one, including the last line end."""
    return float(result == expected)


@metric("anything", "rules", example=(COMMAND, {"expected": ["milk\n", "milk"]}))
def match_in_list(result: Any, *, expected: Annotated[Sequence[Any], Rule("the list", "list")]) -> float:
    """1 if the actual value is one of these."""
    return float(result in expected)


@metric("anything", "rules", example=(COMMAND, {"expected": "milk"}))
def is_in_list(
    result: Sequence[Any] | None, *, expected: Annotated[Any, Rule("a part of a text", "anything")]
) -> float:
    """1 if the actual value contains the expected one."""
    return 0.0 if result is None else float(expected in result)


@metric("text", "rules", example=(COMMAND, {"include": ["milk"], "exclude": ["error"]}))
def check_include_exclude(
    result: str | None,
    *,
    include: Annotated[Sequence[str], Rule("required texts")] = (),
    exclude: Annotated[Sequence[str], Rule("forbidden texts")] = (),
) -> float:
    """1 if a text contains every `include` and no `exclude`."""
    if result is None:
        return 0.0
    return float(all(part in result for part in include) and all(part not in result for part in exclude))


@metric("anything", "anything", example=(COMMAND, {"type": "rule", "rules": "Milk\n"}, {"ignore_case": True}))
def literal_match(
    result: Any,
    expected: Any,
    *,
    type: Annotated[str, Key("whether lists are compared, item by item", "`str` or `list`")] = "str",
    ignore_case: Annotated[bool, Key("whether letter case is ignored")] = False,
) -> float:
    """1 if two values are equal as text. `rules` is the expected value itself."""

    def as_text(value: Any) -> str:
        return str(value).lower() if ignore_case else str(value)

    if type == "str":
        return float(as_text(result) == as_text(expected))
    if type == "list":
        if not isinstance(result, list | tuple) or not isinstance(expected, list | tuple):
            return 0.0
        return float([as_text(item) for item in result] == [as_text(item) for item in expected])
    raise ValueError(f"literal_match supports the types str and list, not {type!r}")


@metric("text", "rules", example=(COMMAND, {"expected": "milk\n"}))
def fuzzy_match(result: str | None, *, expected: Annotated[str, Rule("the other text")]) -> float:
    """Similarity of two texts, 0 to 1."""
    return 0.0 if result is None else indel_ratio(result, expected)


@metric("rules", "text", example=({"expected": "milk"}, output_of("xsel", "--clipboard", "--output")))
def is_in_vm_clickboard(
    terminal_output: str | None,
    *,
    expected: Annotated[str | list[str], Rule("the text or texts", "text or list of texts")],
) -> float:
    """1 if the text of the clipboard contains the expected text. Here `result` has the rules and `expected` the
    command, as in OSWorld."""
    if terminal_output is None:
        return 0.0
    parts = expected if isinstance(expected, list) else [expected]
    return float(all(part in terminal_output for part in parts))


@metric("anything", "rules", example=(output_of("cat", "/home/user/settings.json"), {"expected": {"theme": "dark"}}))
def check_direct_json_object(
    result: Any,
    *,
    expected: Annotated[Mapping[str, Any], Rule("keys and their values", "object")],
    expect_in_result: Annotated[
        bool, Rule("whether the actual value must contain the expected one, or one of several")
    ] = False,
) -> float:
    """1 if a JSON object has each expected key with its value."""
    if isinstance(result, str):
        try:
            result = json.loads(result.strip().replace("'", '"'))
        except (ValueError, RecursionError):
            return 0.0  # invalid output of an agent is its failure, not a crash of the grader
    if not isinstance(result, Mapping) or "__EVALUATION_FAILED__" in expected.values():
        return 0.0
    if expect_in_result:
        return float(all(_lies_in(value, result.get(key)) for key, value in expected.items()))
    if expected.get("ignore_list_order", False):
        # Here OSWorld compares every key, including this flag, as a sorted list; a flag is not a list, so it fails.
        return 0.0
    return float(all(result.get(key) == value for key, value in expected.items()))


def _lies_in(expected: Any, actual: Any) -> bool:
    if isinstance(expected, list):
        if isinstance(actual, list):
            return any(item in actual for item in expected)
        return isinstance(actual, str) and actual in expected
    return isinstance(expected, str) and isinstance(actual, str) and expected in actual


def indel_ratio(left: str, right: str) -> float:
    """Similarity in 0..1: 2 * longest common subsequence / total length, rapidfuzz's `fuzz.ratio` / 100."""
    if not left and not right:
        return 1.0
    return 2 * _lcs_length(left, right) / (len(left) + len(right))


def _lcs_length(left: str, right: str) -> int:
    # Bit-parallel (Hyyrö 2004): one machine-word row of the dynamic programme per character of `right`.
    positions: dict[str, int] = {}
    for index, char in enumerate(left):
        positions[char] = positions.get(char, 0) | (1 << index)
    full = (1 << len(left)) - 1
    row = full
    for char in right:
        match = row & positions.get(char, 0)
        row = ((row + match) | (row - match)) & full
    return len(left) - row.bit_count()
