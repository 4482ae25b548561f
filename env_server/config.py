"""The configuration file (TOML): the fields of ServerSettings by their own names, in tables for each group. Options of
the command line take precedence."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from env_server.providers.kinds import provider_kinds
from env_server.server_settings import ServerSettings
from env_server.settings import OSGYM_VARIABLE, TOKEN_VARIABLE, SettingsError

FROM_ENVIRONMENT = {"token": TOKEN_VARIABLE, "osgym_allowed_ips": OSGYM_VARIABLE} | {
    f"{name}.{field}": variable for name, kind in provider_kinds().items() for field, variable in kind.variables.items()
}
"""Fields that are read only from the environment."""


def read_config(path: Path) -> dict[str, Any]:
    """
    Raises:
        SettingsError: the file cannot be read, is not valid TOML, or has a key that is unknown, must be set in the
            environment, or must be a table.
    """
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the configuration {path}: {error.strerror}; check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"the configuration {path} is not valid TOML: {error}") from error
    _check_names(fields, ServerSettings, path, ())
    return fields


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings table by table and key by key; `above` takes precedence."""
    merged = dict(below)
    for name, value in above.items():
        held = merged.get(name)
        merged[name] = overlay(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return merged


def make_settings(options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> ServerSettings:
    """
    Raises:
        SettingsError: names the setting that is invalid or contradicts another.
    """
    try:
        return ServerSettings.from_environment(environment, **options)
    except ValidationError as error:
        first = error.errors()[0]
        raise SettingsError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _check_names(fields: Mapping[str, Any], model: type[BaseModel], path: Path, table: tuple[str, ...]) -> None:
    for name, value in fields.items():
        where = ".".join((*table, name))
        if where in FROM_ENVIRONMENT:
            variable = FROM_ENVIRONMENT[where]
            raise SettingsError(f"the configuration {path} has {where!r}; set it in the environment: {variable}")
        if name not in model.model_fields:
            names = (key for key in model.model_fields if ".".join((*table, key)) not in FROM_ENVIRONMENT)
            known = ", ".join(sorted(names))
            raise SettingsError(f"the configuration {path} has the unknown key {where!r}; known keys: {known}")
        kind = model.model_fields[name].annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if not isinstance(value, Mapping):
                raise SettingsError(f"the configuration {path} has {where!r} as a value; it must be a table: [{where}]")
            _check_names(value, kind, path, (*table, name))
