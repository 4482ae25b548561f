"""The valid values of parameters, rules and options."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_text(item) for item in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_whole_number(value: Any) -> bool:
    return (
        isinstance(value, int | str) and not isinstance(value, bool) and re.fullmatch(r"[0-9]+", str(value)) is not None
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, Mapping) and item for item in value)


def _is_patterns(value: Any) -> bool:
    if not _is_texts(value):
        return False
    try:
        return all(re.compile(pattern) for pattern in value)
    except (re.error, OverflowError, RecursionError):
        return False


def _is_comparisons(value: Any) -> bool:
    return _is_objects(value) and all(
        isinstance(item.get("key"), list) and isinstance(item.get("method"), str) and "ref" in item for item in value
    )


def _is_files(value: Any, *sources: str) -> bool:
    """Files to put into the desktop, each from one of the `sources`."""
    return _is_objects(value) and all(
        _is_text(file.get("path")) and any(isinstance(file.get(source), str) for source in sources) for file in value
    )


KINDS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "anything": lambda _: True,
        "text": _is_text,
        "list of texts": _is_texts,
        "text or list of texts": lambda value: _is_text(value) or _is_texts(value),
        # OSWorld's own tasks also write "true".
        "true or false": lambda value: isinstance(value, bool) or value == "true",
        "number from 0": _is_number,
        "whole number": _is_whole_number,
        "list of whole numbers": lambda value: isinstance(value, list) and all(map(_is_whole_number, value)),
        "object": _is_object,
        "list": lambda value: isinstance(value, list),
        "list of objects": _is_objects,
        "list of regular expressions": _is_patterns,
        "list of objects with key (a list), method and ref": _is_comparisons,
        "list of files with url and path": lambda value: _is_files(value, "url"),
        "list of files with path and content, content_base64 or local_path": lambda value: _is_files(
            value, "content", "content_base64", "local_path"
        ),
        "`str` or `list`": lambda value: value in ("str", "list"),
    }
)
