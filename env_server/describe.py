"""Writes the example of a configuration file: every setting with its default and its meaning.
`python -m env_server.describe > env_server/example.toml`"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from env_server.config import FROM_ENVIRONMENT
from env_server.server_settings import ServerSettings
from env_server.table import Table, choices_of, meaning

HEAD = """Every setting of the env server, with its default or, if it has none, an example after a '#'. The option
--config FILE reads such a file. Command line options override it. Tokens and passwords are never in it: they come from
the environment."""
WIDTH = 118


def describe() -> str:
    """The whole file."""
    tables = {name: kind for name, field in ServerSettings.model_fields.items() if (kind := _table(field)) is not None}
    plain = {name: field for name, field in ServerSettings.model_fields.items() if name not in tables}
    parts = [_comment(HEAD), *(_entry(name, field) for name, field in plain.items() if name not in FROM_ENVIRONMENT)]
    for name, table in tables.items():
        parts.append(f"[{name}]\n{_comment(' '.join((table.__doc__ or '').split()))}")
        parts += [
            _entry(key, field) for key, field in table.model_fields.items() if f"{name}.{key}" not in FROM_ENVIRONMENT
        ]
    return "\n".join(parts)


def _table(field: FieldInfo) -> type[Table] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Table) else None


def _entry(key: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    choices = f" One of: {', '.join(choices_of(field))}." if choices_of(field) else ""
    line = f"{key} = {_toml(field.examples[0] if value is None and field.examples else value)}"
    return f"{_comment(meaning(field) + choices)}{'# ' if value is None else ''}{line}\n"


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, WIDTH, break_on_hyphens=False))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}" if value >= 100_000 else str(value)
    if isinstance(value, float):
        return str(value)
    if isinstance(value, str | Path):
        return json.dumps(str(value))
    if isinstance(value, tuple):
        return "[" + "".join(_items(value)) + "]"
    assert value == {}, f"no TOML for {value!r}"
    return "{}"


def _items(values: tuple[Any, ...]) -> Iterator[str]:
    """The texts of the values, on a line each if there are several."""
    texts = [_toml(value) for value in values]
    if len(texts) < 2:
        yield from texts
        return
    yield "\n"
    yield from (f"    {text},\n" for text in texts)


if __name__ == "__main__":
    print(describe(), end="")
