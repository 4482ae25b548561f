"""Parts of what several metrics declare. They are not part of the grader version."""

from collections.abc import Sequence
from typing import Annotated

from osworld_pipeline.task_schema.spec import Rule

Names = Annotated[Sequence[str], Rule("the names", may_be_empty=True)]
METHODS = "`key` is the path of a value; `method`: eq, ne, lt, le, gt, ge, re, approx:0.1 or range.te"


def output_of(*command: str) -> dict[str, object]:
    return {"type": "vm_command_line", "command": list(command)}


def file_at(path: str) -> dict[str, object]:
    return {"type": "vm_file", "path": path, "dest": path.rpartition("/")[2]}


COMMAND = {"type": "vm_command_line", "command": "cat notes/todo.txt", "shell": True}
FILE, WANTED_FILE = file_at("/home/user/notes/todo.txt"), file_at("/home/user/wanted.txt")
