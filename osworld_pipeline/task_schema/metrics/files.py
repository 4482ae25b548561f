"""Metrics over fetched files. A missing expected file is a fault of the grader and raises."""

import csv
import difflib
import io
import json
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Annotated, Any

from osworld_pipeline.task_schema.context import ResultFile
from osworld_pipeline.task_schema.examples import FILE, METHODS, WANTED_FILE, file_at
from osworld_pipeline.task_schema.spec import Key, Rule, metric

_PATTERNS = "list of regular expressions"
_Objects = Sequence[Mapping[str, Any]]
_COMPARISONS = "list of objects with key (a list), method and ref"


@metric("file", "file", example=(FILE, WANTED_FILE))
def compare_text_file(
    actual: ResultFile | None,
    expected: ResultFile,
    *,
    ignore_blanks: Annotated[bool, Key("whether consecutive white space, line ends included, is one blank")] = False,
    ignore_case: Annotated[bool, Key("whether letter case is ignored")] = False,
) -> float:
    """1 if two files have the same text."""
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


@metric("file", "file", example=(FILE, WANTED_FILE))
def diff_text_file(result: ResultFile | None, expected: ResultFile) -> float:
    """Similarity of the lines of two files, 0 to 1."""
    if result is None:
        return 0.0
    expected_lines, text = expected.text.splitlines(), _agent_text(result)
    if text is None:
        return 0.0
    return difflib.SequenceMatcher(a=text.splitlines(), b=expected_lines).ratio()


@metric("file", "file", example=(FILE, WANTED_FILE))
def compare_result_files(result: ResultFile | None, expected: ResultFile | None) -> float:
    """1 if two files have the same text, or the same number.

    A numeric answer may also be contained in the result, or be equal within 1e-4."""
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


@metric("file", "rules", example=(FILE, {"expected": ["milk", "bread"]}))
def file_contains(result: ResultFile | None, *, expected: Annotated[Sequence[str], Rule("the texts")]) -> float:
    """1 if a file contains all of these texts."""
    text = _agent_text(result)
    return 0.0 if text is None else float(all(part in text for part in expected))


@metric("file", "rules", example=(FILE, {"expected": 3}))
def check_line_number(
    result: ResultFile | None, *, expected: Annotated[int | str, Rule("the number", "whole number")]
) -> float:
    """1 if this number of lines of a file contain a time of day (12:30:00)."""
    text = _agent_text(result)
    if text is None:
        return 0.0
    pattern = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)")
    return float(sum(bool(pattern.search(line)) for line in text.splitlines()) == int(expected))


@metric("file", "rules", example=(FILE, {"expect": ["^milk$"], "unexpect": ["beer"]}))
def check_list(
    result: ResultFile | None,
    *,
    expect: Annotated[Sequence[str], Rule("required patterns", _PATTERNS)] = (),
    unexpect: Annotated[Sequence[str], Rule("forbidden patterns", _PATTERNS)] = (),
) -> float:
    """1 if every `expect` matches some line of a file, and no `unexpect` matches any."""
    expected, unexpected = [re.compile(pattern) for pattern in expect], [re.compile(pattern) for pattern in unexpect]
    text = _agent_text(result)
    if text is None:
        return 0.0
    lines = text.splitlines()
    has_all = all(any(pattern.search(line) for line in lines) for pattern in expected)
    return float(has_all and not any(pattern.search(line) for pattern in unexpected for line in lines))


@metric("file", "rules", example=(file_at("/home/user/people.csv"), {"expect": [{"name": "Ada", "born": "1815"}]}))
def check_csv(
    result: ResultFile | None,
    *,
    expect: Annotated[_Objects, Rule("column and value pairs, one object per row", "list of objects")] = (),
    unexpect: Annotated[_Objects, Rule("the same", "list of objects")] = (),
) -> float:
    """1 if a CSV file has a row for each `expect`, and none for any `unexpect`."""
    text = _agent_text(result)
    if text is None:
        return 0.0
    try:
        records = list(csv.DictReader(io.StringIO(text)))
    except csv.Error:  # a field longer than the reader's limit
        return 0.0

    def occurs(pattern: Mapping[str, str]) -> bool:
        return any(all(record.get(key) == value for key, value in pattern.items()) for record in records)

    return float(all(map(occurs, expect)) and not any(map(occurs, unexpect)))


@metric(
    "file", "rules", example=(file_at("/home/user/settings.json"),
                              {"expect": [{"key": ["editor", "tab"], "method": "eq", "ref": 4}]}),
)  # fmt: skip
def check_json(
    result: ResultFile | None,
    *,
    expect: Annotated[_Objects, Rule(METHODS, _COMPARISONS)] = (),
    unexpect: Annotated[_Objects, Rule("the same", _COMPARISONS)] = (),
    is_yaml: Annotated[bool, Key("whether the file is YAML")] = False,
) -> float:
    """1 if values of a JSON file fulfil every `expect` and no `unexpect`."""
    import yaml  # here: only the env server has it

    text = _agent_text(result)
    try:
        data = None if text is None else yaml.safe_load(text) if is_yaml else json.loads(text)
    # A ValueError is invalid JSON, or an impossible date in YAML.
    except (ValueError, RecursionError, yaml.YAMLError):
        return 0.0
    if data is None:
        return 0.0
    for rule in expect:
        is_there, value = _walk(data, rule["key"])
        if not is_there or not _fulfils(value, rule):
            return 0.0
    for rule in unexpect:
        if _fulfils(_walk(data, rule["key"])[1], rule):
            return 0.0
    return 1.0


def _agent_text(file: ResultFile | None) -> str | None:
    """None for bytes that are not text: an invalid file of the agent is its failure, not a crash of the grader."""
    try:
        return None if file is None else file.text
    except UnicodeDecodeError:
        return None


def _walk(data: Any, path: Iterable[Any]) -> tuple[bool, Any]:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return False, None
    return True, data


def _fulfils(value: Any, rule: Mapping[str, Any]) -> bool:
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
