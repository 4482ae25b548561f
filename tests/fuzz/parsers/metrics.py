"""Grading: files, texts and trees that an agent made."""

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from fuzz.parser import Parser, text_of
from osworld_pipeline.task_schema.context import ResultFile
from osworld_pipeline.task_schema.metrics import METRICS

WANTED = ResultFile(name="wanted", data=b"alpha\nbravo 10:11:12\n3.5\n")
NUMBER = ResultFile(name="wanted", data=b"3.5\n")
_EXPECT = {"expect": [{"a": "1"}], "unexpect": [{"b": "2"}]}
_METHODS = ("eq", "ne", "le", "gt", "approx:0.1", "re.I", "range.ee", "str_list_eq", "str_set_eq")
_PATHS = [
    {
        "key": ["a", 0],
        "method": method,
        "ref": [1, 2]
        if method.startswith("range")
        else ["a"]
        if "list" in method or "set" in method
        else "a+"
        if method.startswith("re")
        else 1,
    }
    for method in _METHODS
]
OF_FILES: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = {
    "compare_text_file": ((WANTED,), {"ignore_blanks": True, "ignore_case": True}),
    "diff_text_file": ((WANTED,), {}),
    "compare_result_files": ((NUMBER,), {}),
    "file_contains": (({"expected": ["alpha"]},), {}),
    "check_line_number": (({"expected": "1"},), {}),
    "check_list": (({"expect": ["^a+$"], "unexpect": ["z"]},), {}),
    "check_csv": ((_EXPECT,), {}),
    "check_json": (({"expect": _PATHS[:1], "unexpect": _PATHS},), {}),
    "windows_exact_match": (({"expected": "alpha"},), {}),
    "windows_date_format": (({},), {}),
    "windows_names_listed": (({"expected": ["alpha", "bravo"]},), {}),
    "windows_has_all": (({"expected": ["alpha", "bravo"]},), {}),
    "windows_non_empty": (({},), {}),
}
OF_TEXTS: Mapping[str, Mapping[str, Any]] = {
    "exact_match": {"expected": "a"},
    "match_in_list": {"expected": ["a"]},
    "check_include_exclude": {"include": ["a"], "exclude": ["b"]},
    "fuzzy_match": {"expected": "alpha bravo"},
    "check_direct_json_object": {"expected": {"a": "1", "b": ["2"]}, "expect_in_result": True},
}


def _need_score(name: str, *arguments: Any, **options: Any) -> None:
    score = METRICS[name](*arguments, **options)
    assert math.isfinite(score), (name, score)
    assert 0 <= score <= 1, (name, score)


def _file(data: bytes) -> None:
    found = ResultFile(name="found", data=data)
    for name, (rules, options) in OF_FILES.items():
        _need_score(name, found, *rules, **options)
    _need_score("check_json", found, {"expect": _PATHS}, is_yaml=True)


def _text(data: bytes) -> None:
    text = text_of(data)
    for name, rules in OF_TEXTS.items():
        _need_score(name, text, rules)
    _need_score("is_in_vm_clickboard", {"expected": ["a", "b"]}, text)
    _need_score("literal_match", text, "[1]", ignore_case=True)
    _need_score("literal_match", text, ["1"], type="list")


def _report(data: bytes) -> None:
    """Grades the output of a system's own tool. If the tool prints something else, the grader is at fault."""
    text = text_of(data)
    for name, *rules in (("check_text_enlarged",), ("is_utc_0",), ("check_gnome_favorite_apps", {"expected": ["a"]})):
        with contextlib.suppress(ValueError, TypeError, IndexError, SyntaxError, MemoryError, RecursionError):
            _need_score(name, text, *rules)


def _tree(data: bytes) -> None:
    tree = json.loads(data)
    if isinstance(tree, dict):
        _need_score("check_moved_jpgs", tree, {"expected": ["a.jpg"]})


PARSERS = [
    Parser(
        name="graded_file",
        read=_file,
        seeds=(b"alpha\nbravo 10:11:12\n", b"a,b\n1,3\n", b'{"a": [1]}', b"a: [1]\n", "alpha\r\n".encode("utf-16")),
    ),
    Parser(name="graded_text", read=_text, seeds=(b"{'a': '1'}", b"Time zone: UTC (UTC, +0000)\n[1]")),
    Parser(
        name="graded_report",
        read=_report,
        seeds=(b"1.25", b"@as ['a']", b"a\nb\nc\nTime zone: UTC (UTC, +0000)"),
    ),
    Parser(
        name="graded_tree",
        read=_tree,
        refusals=(ValueError, RecursionError, KeyError, TypeError),
        seeds=(b'{"type": "directory", "name": "a", "children": [{"type": "file", "name": "a.jpg"}]}',),
    ),
]
