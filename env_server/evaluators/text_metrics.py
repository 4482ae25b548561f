"""Metrics over values: strings, lists and numbers against a rule. Names, defaults and scores are OSWorld's; a result
of None (the getter found nothing) scores 0."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Rules = Mapping[str, Any]


def exact_match(result: Any, rules: Rules) -> float:
    return float(result == rules["expected"])


def match_in_list(result: Any, rules: Rules) -> float:
    return float(result in rules["expected"])


def is_in_list(result: Sequence[Any] | None, rules: Rules) -> float:
    return 0.0 if result is None else float(rules["expected"] in result)


def check_include_exclude(result: str | None, rules: Rules) -> float:
    if result is None:
        return 0.0
    has_all = all(part in result for part in rules.get("include", []))
    return float(has_all and all(part not in result for part in rules.get("exclude", [])))


def literal_match(result: Any, expected: Any, *, type: str = "str", ignore_case: bool = False) -> float:
    def as_text(value: Any) -> str:
        return str(value).lower() if ignore_case else str(value)

    if type == "str":
        return float(as_text(result) == as_text(expected))
    if type == "list":
        if not isinstance(result, list | tuple) or not isinstance(expected, list | tuple):
            return 0.0
        return float([as_text(item) for item in result] == [as_text(item) for item in expected])
    raise ValueError(f"literal_match supports the types str and list, not {type!r}")


def fuzzy_match(result: str | None, rules: Rules) -> float:
    return 0.0 if result is None else indel_ratio(result, rules["expected"])


def is_in_vm_clickboard(config: Rules, terminal_output: str | None) -> float:
    """The name and the order of arguments (rule first) are OSWorld's."""
    if terminal_output is None:
        return 0.0
    expected = config["expected"]
    parts = expected if isinstance(expected, list) else [expected]
    return float(all(part in terminal_output for part in parts))


def check_direct_json_object(result: Any, rules: Rules) -> float:
    """Each expected key's value equals the result's value (or, with `expect_in_result`, is contained in it)."""
    if isinstance(result, str):
        try:
            result = json.loads(result.strip().replace("'", '"'))
        except (ValueError, RecursionError):
            return 0.0  # invalid output of an agent is its failure, not a crash of the grader
    expected = rules.get("expected", {})
    if result is None or "__EVALUATION_FAILED__" in expected.values():
        return 0.0
    if not isinstance(result, Mapping):
        return 0.0
    if rules.get("expect_in_result", False):
        return float(all(_lies_in(value, result.get(key)) for key, value in expected.items()))
    if expected.get("ignore_list_order", False):
        # Here OSWorld compares every key, including this flag, as a sorted list; a flag is no list, so it fails.
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
