"""The installed commands of servers. Each imports its program when it is called, so that a missing package is reported
in one sentence."""

import sys
from functools import partial
from importlib import import_module
from typing import NoReturn

from osworld_pipeline.programs.failures import Asked, fail
from osworld_pipeline.programs.short_process import imports_without_collection, run_process


def env_server() -> NoReturn:
    run_process(partial(_run, "env-server", "env_server.main"))


def gateway() -> NoReturn:
    run_process(partial(_run, "osworld-gateway", "env_server.gateway_server.main"))


def _run(program: str, module: str) -> int:
    try:
        with imports_without_collection():
            main = import_module(module).main
    except Exception as error:  # noqa: BLE001 - shown as a defect, with its traceback in a file
        return fail(error, Asked.of(sys.argv[1:]), program=program)
    return main()
