"""All settings of an env server, with a table for each kind of desktop; the secrets come from the environment."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, SecretStr, create_model, field_validator

from env_server.providers.kinds import provider_kinds
from env_server.settings import OSGYM_VARIABLE, TOKEN_VARIABLE, Settings, SettingsError, osgym_networks
from env_server.table import Option
from osworld_pipeline.wire.cross_site import is_loopback


class _OfAnyKind(Settings):
    provider: Annotated[str, Option(choices=provider_kinds)] = "local"
    """Kind of desktop."""

    @field_validator("provider")
    @classmethod
    def _is_a_kind(cls, name: str) -> str:
        if name not in provider_kinds():
            raise ValueError(f"there is no provider '{name}'; there are: {', '.join(provider_kinds())}")
        return name

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, **options: object) -> Self:
        """`options` come from the command line and a configuration file; the token comes only from the environment,
        because arguments are visible in every process list.

        Raises:
            SettingsError: the server would serve a network without a token, or OSGym's ports to all addresses.
        """
        source = os.environ if environment is None else environment
        token = source.get(TOKEN_VARIABLE, "").strip()
        settings = cls.model_validate(
            {
                **options,
                **_with_secrets(options, source),
                "token": SecretStr(token) if token else None,
                "osgym_allowed_ips": osgym_networks(source) or options.get("osgym_allowed_ips", ()),
            }
        )
        if settings.token is None and not is_loopback(settings.host):
            raise SettingsError(
                f"refusing to serve desktops on {settings.host} without a token: set {TOKEN_VARIABLE}, "
                "or bind to 127.0.0.1"
            )
        if settings.osgym.ports and not settings.osgym_allowed_ips:
            raise SettingsError(
                f"refusing to serve OSGym's ports to all addresses: set {OSGYM_VARIABLE} to those of the clients, "
                "separated by commas, for example 127.0.0.1,10.0.0.0/24"
            )
        return settings


if TYPE_CHECKING:

    class ServerSettings(_OfAnyKind): ...

else:
    # A field for each provider, with its settings.
    ServerSettings = create_model(
        "ServerSettings",
        __base__=_OfAnyKind,
        **{name: (kind.settings, kind.settings()) for name, kind in provider_kinds().items()},
    )


def _with_secrets(options: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, object]:
    """The tables of the providers that take secrets from the environment."""
    tables: dict[str, object] = {}
    for name, kind in provider_kinds().items():
        found = {field: environment.get(variable, "").strip() for field, variable in kind.variables.items()}
        secrets = {field: SecretStr(text) for field, text in found.items() if text}
        if secrets:
            table = options.get(name, {})
            given = dict(table) if isinstance(table, Mapping | BaseModel) else {}
            tables[name] = {**given, **secrets}
    return tables
