"""The installed commands of servers. Each imports its program when it is called: a package that is missing is one
sentence."""

import sys
from importlib import import_module

from osworld_pipeline.domain.remedies import missing_package


def env_server() -> int:
    return _run("env-server", "env_server.main")


def gateway() -> int:
    return _run("osworld-gateway", "env_server.gateway_server.main")


def _run(program: str, module: str) -> int:
    try:
        main = import_module(module).main
    except ModuleNotFoundError as error:
        explained = missing_package(error.name or "")
        if explained is None:
            raise
        print(f"{program}: {explained}", file=sys.stderr)
        return 1
    return main()
