"""Commands as they appear in a message or a page, for tests that paste them."""

import re
import shlex

_COMMAND = re.compile(r"(?:\S*/)?osworld-pipeline [^`;]*?--state (?:'[^']*'|[^\s`;,:()']+)")


def pasted(text: str) -> list[str]:
    """The arguments of the one command of `osworld-pipeline` in the text."""
    (line,) = _COMMAND.findall(text)
    return shlex.split(line)[1:]
