"""The command lines of the servers' programs, by argparse."""

import argparse
import sys
from typing import Any, NoReturn

from osworld_pipeline.programs.answers import FLAG, print_usage_error, wants_json
from osworld_pipeline.programs.failures import DEBUG


class ArgumentParser(argparse.ArgumentParser):
    """With --json a usage error is printed as one JSON object on standard error. Parsers of subcommands are of this
    class, too."""

    _as_json = False

    def parse_known_args(self, args: Any = None, *more: Any, **named: Any) -> Any:
        self._as_json = wants_json(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, *more, **named)

    def error(self, message: str) -> NoReturn:
        if self._as_json:
            self.exit(print_usage_error(message))
        super().error(message)


def add_json(parser: argparse.ArgumentParser, meaning: str = "print the result or the error as JSON") -> None:
    """The value is `as_json`."""
    parser.add_argument(FLAG, dest="as_json", action="store_true", help=meaning)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """--json and --debug of a program that serves. `run_server_program` handles --debug."""
    add_json(parser, "print one line of JSON when it is ready: url, pid, ...; an error as JSON")
    parser.add_argument(
        DEBUG, action="store_true", help="print the traceback of an error; may also follow the name of a command"
    )
