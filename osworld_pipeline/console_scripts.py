"""The installed commands of servers. Each imports its program when it is called: a package that is missing is one
sentence."""

import sys
from importlib import import_module

from osworld_pipeline.programs.failures import Asked, fail


def env_server() -> int:
    return _run("env-server", "env_server.main")


def gateway() -> int:
    return _run("osworld-gateway", "env_server.gateway_server.main")


def _run(program: str, module: str) -> int:
    try:
        main = import_module(module).main
    except Exception as error:  # noqa: BLE001 - shown as a defect, with its traceback in a file
        return fail(error, Asked.of(sys.argv[1:]), program=program)
    return main()
