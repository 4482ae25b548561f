"""Metrics: comparisons of the actual state with the expected state (`evaluator.func`)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from osworld_pipeline.domain.task_schema.spec import Key, Metric, State

_COMMAND = {"type": "vm_command_line", "command": "cat notes/todo.txt", "shell": True}
_FILE = {"type": "vm_file", "path": "/home/user/notes/todo.txt", "dest": "todo.txt"}
_TEXTS = "list of texts"
_IGNORE_CASE = Key(name="ignore_case", kind="true or false", about="whether letter case is ignored")


def _expected(about: str, kind: str = "text", *, may_be_empty: bool = False) -> tuple[Key, ...]:
    return (Key(name="expected", kind=kind, about=about, is_required=True, may_be_empty=may_be_empty),)


def _either(kind: str, wanted: tuple[str, str], unwanted: tuple[str, str]) -> tuple[Key, ...]:
    return tuple(Key(name=name, kind=kind, about=about) for name, about in (wanted, unwanted))


def _metric(
    name: str,
    about: str,
    rules: tuple[Key, ...] = (),
    *,
    result: Mapping[str, Any],
    rule: Mapping[str, Any] | None = None,
    reads: State = "text",
    needs_a_rule: bool = False,
) -> Metric:
    """A metric that compares with rules, if there are any."""
    example = {"func": name, "result": result}
    if rule is not None:
        example["expected"] = {"type": "rule", "rules": rule}
    return Metric(
        name=name, about=about, rules=rules, result=reads, expected=None if rule is None else "rules",
        needs_a_rule=needs_a_rule, example=example,
    )  # fmt: skip


def _of_files(name: str, about: str, *options: Key) -> Metric:
    example = {
        "func": name,
        "result": _FILE,
        "expected": {**_FILE, "path": "/home/user/wanted.txt", "dest": "wanted.txt"},
    }
    return Metric(name=name, about=about, result="file", expected="file", options=options, example=example)


_ALL = (
    _metric(
        "check_csv", "1 if a CSV file has a row for each `expect`, and none for any `unexpect`.",
        _either("list of objects", ("expect", "column and value pairs, one object per row"), ("unexpect", "the same")),
        reads="file", needs_a_rule=True, result={**_FILE, "path": "/home/user/people.csv", "dest": "people.csv"},
        rule={"expect": [{"name": "Ada", "born": "1815"}]},
    ),
    _metric(
        "check_direct_json_object", "1 if a JSON object has each expected key with its value.",
        (*_expected("keys and their values", "object"),
         Key(name="expect_in_result", kind="true or false",
             about="whether the actual value must contain the expected one, or one of several")),
        reads="anything", result={"type": "vm_command_line", "command": ["cat", "/home/user/settings.json"]},
        rule={"expected": {"theme": "dark"}},
    ),
    _metric(
        "check_gnome_favorite_apps", "1 if a list printed by gsettings has exactly these names, in any order.",
        _expected("the names", _TEXTS, may_be_empty=True),
        result={"type": "vm_command_line", "command": ["gsettings", "get", "org.gnome.shell", "favorite-apps"]},
        rule={"expected": ["firefox.desktop", "thunderbird.desktop"]},
    ),
    _metric(
        "check_include_exclude", "1 if a text contains every `include` and no `exclude`.",
        _either(_TEXTS, ("include", "required texts"), ("exclude", "forbidden texts")),
        result=_COMMAND, rule={"include": ["milk"], "exclude": ["error"]}, needs_a_rule=True,
    ),
    Metric(
        name="check_json", about="1 if values of a JSON file fulfil every `expect` and no `unexpect`.",
        result="file", expected="rules", needs_a_rule=True,
        rules=_either(
            "list of objects with key (a list), method and ref",
            ("expect", "`key` is the path of a value; `method`: eq, ne, lt, le, gt, ge, re, approx:0.1 or range.te"),
            ("unexpect", "the same"),
        ),
        options=(Key(name="is_yaml", kind="true or false", about="whether the file is YAML"),),
        example={
            "func": "check_json",
            "result": {**_FILE, "path": "/home/user/settings.json", "dest": "settings.json"},
            "expected": {"type": "rule", "rules": {"expect": [{"key": ["editor", "tab"], "method": "eq", "ref": 4}]}},
        },
    ),
    _metric(
        "check_line_number", "1 if this number of lines of a file contain a time of day (12:30:00).",
        _expected("the number", "whole number"), reads="file", result=_FILE, rule={"expected": 3},
    ),
    _metric(
        "check_list", "1 if every `expect` matches some line of a file, and no `unexpect` matches any.",
        _either("list of regular expressions", ("expect", "required patterns"), ("unexpect", "forbidden patterns")),
        reads="file", result=_FILE, rule={"expect": ["^milk$"], "unexpect": ["beer"]}, needs_a_rule=True,
    ),
    _metric(
        "check_moved_jpgs", "1 if a folder has exactly these names.",
        _expected("the names", _TEXTS, may_be_empty=True), reads="tree",
        result={"type": "list_directory", "path": "/home/user/photos"}, rule={"expected": ["sea.jpg", "wood.jpg"]},
    ),
    _metric(
        "check_text_enlarged", "1 if a number, the text scaling factor of the desktop, is above 1.",
        result={"type": "vm_command_line", "command": "gsettings get org.gnome.desktop.interface text-scaling-factor",
                "shell": True},
    ),
    _of_files("compare_result_files", "1 if two files have the same text, or the same number."),
    _of_files(
        "compare_text_file", "1 if two files have the same text.",
        Key(name="ignore_blanks", kind="true or false", about="whether white space counts as one blank"), _IGNORE_CASE,
    ),
    _of_files("diff_text_file", "Similarity of the lines of two files, 0 to 1."),
    _metric(
        "exact_match", "1 if the actual value equals the expected one, including the last line end.",
        _expected("the value", "anything", may_be_empty=True), reads="anything", result=_COMMAND,
        rule={"expected": "milk\n"},
    ),
    _metric(
        "file_contains", "1 if a file contains all of these texts.", _expected("the texts", _TEXTS), reads="file",
        result=_FILE, rule={"expected": ["milk", "bread"]},
    ),
    _metric("fuzzy_match", "Similarity of two texts, 0 to 1.", _expected("the other text"), result=_COMMAND,
            rule={"expected": "milk\n"}),
    _metric(
        "is_in_list", "1 if the actual value contains the expected one.", _expected("a part of a text", "anything"),
        reads="anything", result=_COMMAND, rule={"expected": "milk"},
    ),
    Metric(
        name="is_in_vm_clickboard",
        about="1 if the text of the clipboard contains the expected text. Here `result` has the rules and `expected` "
        "the command, as in OSWorld.",
        result="rules", expected="text", rules=_expected("the text or texts", "text or list of texts"),
        example={
            "func": "is_in_vm_clickboard",
            "result": {"type": "rule", "rules": {"expected": "milk"}},
            "expected": {"type": "vm_command_line", "command": ["xsel", "--clipboard", "--output"]},
        },
    ),
    _metric(
        "is_utc_0", "1 if the fourth line of `timedatectl status` names a zone without offset.",
        result={"type": "vm_command_line", "command": ["timedatectl", "status"]},
    ),
    Metric(
        name="literal_match", about="1 if two values are equal as text. `rules` is the expected value itself.",
        result="anything", expected="anything",
        options=(Key(name="type", kind="`str` or `list`", about="whether lists are compared, item by item"),
                 _IGNORE_CASE),
        example={"func": "literal_match", "result": _COMMAND, "expected": {"type": "rule", "rules": "Milk\n"},
                 "options": {"ignore_case": True}},
    ),
    _metric(
        "match_in_list", "1 if the actual value is one of these.", _expected("the list", "list"), reads="anything",
        result=_COMMAND, rule={"expected": ["milk\n", "milk"]},
    ),
    _metric(
        "windows_date_format", "1 if a text file is a date like 2026-11-22, 0.5 if it contains one, 0.1 for any text.",
        reads="file", result=_FILE, rule={},
    ),
    _metric(
        "windows_exact_match", "1 if a text file is the text, 0.5 if it contains it in any letter case, 0.2 for any "
        "other text. Encodings and line ends of Windows are supported.",
        _expected("the text"), reads="file", result=_FILE, rule={"expected": "milk"},
    ),
    _metric(
        "windows_has_all", "1 if a text file contains each of the words, 0.5 for some of them, 0.1 for any other text.",
        _expected("the words", _TEXTS), reads="file", result=_FILE, rule={"expected": ["milk", "bread"]},
    ),
    _metric(
        "windows_names_listed", "1 if a text file contains at least two of the names, in any letter case, 0.5 for one, "
        "0.1 for any other text.",
        _expected("the names", _TEXTS), reads="file", result=_FILE, rule={"expected": ["ada.txt", "bob.txt"]},
    ),
    _metric("windows_non_empty", "1 if a file contains more than white space.", reads="file", result=_FILE, rule={}),
)  # fmt: skip
METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _ALL})
