"""Clients of gateways by name: the reference client, and those that other distributions register as entry points."""

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points

from env_server.providers.gateway.client import ClientOptions, SandboxClient
from env_server.providers.gateway.https_client import HttpsSandboxClient
from osworld_pipeline.errors import DependencyError, PipelineError

ENTRY_POINTS = "osworld_pipeline.sandbox_clients"
"""The group in which a distribution registers its clients: callables with one argument, ClientOptions."""
MakeClient = Callable[[ClientOptions], SandboxClient]


def load_client(name: str, options: ClientOptions) -> SandboxClient:
    """`name` is that of an entry point, or module:attribute.

    Raises:
        DependencyError: there is no such client (the message lists the known ones), or it cannot be created.
        ValueError: the client rejects these options.
    """
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    try:
        if name == "https":  # also if this checkout is not installed
            make: MakeClient = HttpsSandboxClient
        elif name in found:
            make = found[name].load()
        elif ":" in name:
            module, _, attribute = name.partition(":")
            make = getattr(importlib.import_module(module), attribute)
        else:
            known = ", ".join(sorted({"https", *found}))
            raise DependencyError(
                f"no sandbox client is named {name!r}; known: {known}. Install the distribution that has it (an "
                f"entry point of the group {ENTRY_POINTS}), or give module:attribute"
            )
        return make(options)
    except PipelineError:
        raise
    except (ImportError, AttributeError, TypeError) as error:
        raise DependencyError(
            f"the sandbox client {name!r} cannot be created ({error}); check --gateway-client"
        ) from error
