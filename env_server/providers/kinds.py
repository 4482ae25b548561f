"""The kinds of providers: each is a package below this one whose module `kind` declares its settings, its command line
options and how it is made. To add one, add a package."""

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from env_server import providers

if TYPE_CHECKING:
    from env_server.episodes.driver import Drivers
    from env_server.providers.base import Provider
    from env_server.settings import Settings

KIND = "kind"


class OptionGroup:
    """Command line options that set the fields of a provider's settings; those that are not given are not in the parsed
    arguments."""

    def __init__(self, parser: Any, table: str = "") -> None:
        """`parser`: of argparse, or a group of it; `table`: the provider's name; empty for the server's settings."""
        self._parser, self._table = parser, table

    def option(self, field: str, flag: str | None = None, **options: Any) -> None:
        """`flag`: by default the field's name."""
        options.setdefault("metavar", None if "choices" in options else field.upper())
        flag = flag or f"--{field.replace('_', '-')}"
        self._parser.add_argument(flag, dest=self._name(field), default=argparse.SUPPRESS, **options)

    def flag(self, field: str, text: str) -> None:
        self._parser.add_argument(
            f"--{field.replace('_', '-')}",
            dest=self._name(field),
            action="store_true",
            default=argparse.SUPPRESS,
            help=text,
        )

    def _name(self, field: str) -> str:
        return f"{self._table}.{field}" if self._table else field


@dataclass(frozen=True, kw_only=True)
class ProviderKind:
    name: str
    settings: type[BaseModel]
    """Its table in the configuration file, of the same name; every field has a default."""
    add_options: Callable[[OptionGroup], None]
    make: "Callable[[Settings], Provider]"
    """Raises ValueError or DependencyError if it does not work with these settings, or not on this machine."""
    make_drivers: "Callable[[Settings], Drivers] | None" = None
    """What runs episodes on its desktops; None for the drivers of desktops with a guest agent."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Fields with secrets, each with the environment variable that sets it; no other source may."""
    title: str = ""
    """Of its options in the help; empty: its name."""
    about: str = ""
    """One sentence of the help."""
    has_ports: bool = False
    """Ports of its desktops are reached through a proxy only."""


@cache
def provider_kinds() -> Mapping[str, ProviderKind]:
    """All kinds, by name; `local` first."""
    names = (one.name for one in pkgutil.iter_modules(providers.__path__) if one.ispkg)
    found = [importlib.import_module(f"{providers.__name__}.{name}.{KIND}").KIND for name in names]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: (kind.name != "local", kind.name))}
