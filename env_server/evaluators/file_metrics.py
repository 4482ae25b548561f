"""Metrics over fetched files. A file that does not exist (None) scores 0, as in OSWorld; a missing expected file is a
fault of the grader and raises."""

import csv
import difflib
import io
import json
import operator
import re
from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import yaml

from env_server.evaluators.result_file import ResultFile

Rules = Mapping[str, Any]


def compare_text_file(
    actual: ResultFile | None, expected: ResultFile, *, ignore_blanks: bool = False, ignore_case: bool = False
) -> float:
    if actual is None:
        return 0.0
    texts = []
    # The expected file first: if it is unreadable the grader is at fault, regardless of the agent's file.
    for text in (expected.text, _agent_text(actual)):
        if text is None:
            return 0.0
        if ignore_blanks:
            text = re.sub(r"\s+", " ", re.sub(r"[\t\n]", " ", text).strip())
        texts.append(text.lower() if ignore_case else text)
    return float(texts[0] == texts[1])


def diff_text_file(result: ResultFile | None, expected: ResultFile) -> float:
    """Similarity of the lines, 0..1."""
    if result is None:
        return 0.0
    expected_lines, text = expected.text.splitlines(), _agent_text(result)
    if text is None:
        return 0.0
    return difflib.SequenceMatcher(a=text.splitlines(), b=expected_lines).ratio()


def compare_result_files(result: ResultFile | None, expected: ResultFile | None) -> float:
    """Equal contents; a numeric answer may also be contained in the result, or be equal within 1e-4."""
    if result is None or expected is None:
        return 0.0
    expected_text, result_text = expected.text.strip(), (_agent_text(result) or "").strip()
    try:
        number = float(expected_text)
    except ValueError:
        return float(result_text == expected_text)
    if expected_text in result_text:
        return 1.0
    try:
        return float(abs(float(result_text) - number) < 1e-4)
    except ValueError:
        return 0.0


def file_contains(result: ResultFile | None, rules: Rules) -> float:
    expected = rules["expected"]
    text = None if result is None else _agent_text(result)
    return 0.0 if text is None else float(all(part in text for part in expected))


def check_line_number(result: ResultFile | None, rules: Rules) -> float:
    """As many lines with a time of day as expected."""
    expected = int(rules["expected"])
    text = None if result is None else _agent_text(result)
    if text is None:
        return 0.0
    pattern = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)")
    return float(sum(bool(pattern.search(line)) for line in text.splitlines()) == expected)


def check_list(result: ResultFile | None, rules: Rules) -> float:
    """Each `expect` pattern is found in some line, no `unexpect` pattern in any."""
    expected = [re.compile(pattern) for pattern in rules.get("expect", [])]
    unexpected = [re.compile(pattern) for pattern in rules.get("unexpect", [])]
    text = None if result is None else _agent_text(result)
    if text is None:
        return 0.0
    lines = text.splitlines()
    has_all = all(any(pattern.search(line) for line in lines) for pattern in expected)
    return float(has_all and not any(pattern.search(line) for pattern in unexpected for line in lines))


def check_csv(result: ResultFile | None, rules: Rules) -> float:
    """Some record has each `expect` entry's values, none has an `unexpect` entry's."""
    text = None if result is None else _agent_text(result)
    if text is None:
        return 0.0
    try:
        records = list(csv.DictReader(io.StringIO(text)))
    except csv.Error:  # a field longer than the reader's limit
        return 0.0

    def occurs(pattern: Mapping[str, str]) -> bool:
        return any(all(record.get(key) == value for key, value in pattern.items()) for record in records)

    has_all = all(occurs(pattern) for pattern in rules.get("expect", []))
    return float(has_all and not any(occurs(pattern) for pattern in rules.get("unexpect", [])))


def check_json(result: ResultFile | None, rules: Rules, *, is_yaml: bool = False) -> float:
    """Values at key paths satisfy their rules (`method`, `ref`)."""
    text = None if result is None else _agent_text(result)
    try:
        data = None if text is None else yaml.safe_load(text) if is_yaml else json.loads(text)
    # A ValueError is invalid JSON, or an impossible date in YAML.
    except (ValueError, RecursionError, yaml.YAMLError):
        return 0.0
    if data is None:
        return 0.0
    for rule in rules.get("expect", []):
        is_there, value = _walk(data, rule["key"])
        if not is_there or not _fulfils(value, rule):
            return 0.0
    for rule in rules.get("unexpect", []):
        if _fulfils(_walk(data, rule["key"])[1], rule):
            return 0.0
    return 1.0


def _agent_text(file: ResultFile) -> str | None:
    """None for bytes that are not text: an invalid file of the agent is its failure, not a crash of the grader."""
    try:
        return file.text
    except UnicodeDecodeError:
        return None


def _walk(data: Any, path: Iterable[Any]) -> tuple[bool, Any]:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, data


def _fulfils(value: Any, rule: Rules) -> bool:
    method, ref = str(rule["method"]), rule["ref"]
    if method.startswith("re"):
        flags = reduce(operator.or_, (re.RegexFlag[name] for name in method.split(".")[1:]), re.RegexFlag(0))
        return isinstance(value, str) and re.search(ref, value, flags) is not None
    if method in ("eq", "ne"):
        return bool(getattr(operator, method)(value, ref))
    if not method.startswith("approx") and method not in ("le", "lt", "ge", "gt") and not method.startswith("range."):
        raise ValueError(f"check_json has no method {method!r}")
    try:
        if method.startswith("approx"):
            return abs(float(value) - ref) <= float(method.split(":")[1])
        if method.startswith("range."):
            low, high = getattr(operator, f"l{method[6]}"), getattr(operator, f"l{method[7]}")
            return bool(low(ref[0], value) and high(value, ref[1]))
        return bool(getattr(operator, method)(value, ref))
    except (TypeError, ValueError):
        return False
