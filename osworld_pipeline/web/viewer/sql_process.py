"""The process that runs one query with users' SQL and ends. It trusts the viewer's statements, but not `text`. The
kernel enforces its memory limit, because DuckDB's own limit does not count everything."""

import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from typing import Any

import duckdb

from osworld_pipeline.domain.parent import dies_with_parent

LENGTH = struct.Struct("!Q")
MEMORY_LIMIT_BYTES = 2 << 30
"""Limit of the process's address space."""
BOUNDS: Mapping[str, Any] = {
    "memory_limit": "1GB",  # counted by DuckDB; the rest is for code, threads and uncounted memory
    "temp_directory": "",
    "threads": min(4, os.cpu_count() or 1),
}
NICENESS = 10
"""Pages have a higher priority."""
MAX_ANSWER_BYTES = 64 << 20


def main(parent_pid: int) -> int:
    if not dies_with_parent(signal.SIGKILL, parent_pid=parent_pid):
        return 1
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    head = sys.stdin.buffer.read(LENGTH.size)
    if not head:
        return 0
    answer = json.dumps(answer_to(json.loads(sys.stdin.buffer.read(LENGTH.unpack(head)[0])))).encode()
    if len(answer) > MAX_ANSWER_BYTES:
        size = f"{MAX_ANSWER_BYTES >> 20} MiB"
        refused = f"the result has over {size} of episode ids: choose facets, or narrow the condition"
        answer = json.dumps({"refused": refused}).encode()
    sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
    sys.stdout.buffer.flush()
    return 0


def answer_to(question: dict[str, Any]) -> dict[str, Any]:
    """`ids`; or `refused`, an error message; or `is_too_much`, if memory did not suffice."""
    try:
        with duckdb.connect(":memory:", config=dict(BOUNDS)) as connection:
            for statement in question["statements"]:
                connection.execute(statement)
            for setting in (
                f"allowed_directories = {question['folders']}",
                "enable_external_access = false",
                "python_enable_replacements = false",
                "enable_progress_bar = false",
                "lock_configuration = true",
            ):
                connection.execute(f"SET {setting}")
            sql, values = question_sql(connection, question["kind"], question["text"])
            found = connection.execute(sql, values).fetchall()
            return {"ids": [row[0] for row in found if isinstance(row[0], str)]}
    except (duckdb.OutOfMemoryException, MemoryError):
        return {"is_too_much": True}
    except NoConditionError as error:
        return {"refused": str(error)}
    except duckdb.Error as error:
        return {"refused": f"DuckDB refuses the condition: {_refusal(error)}"}


class NoConditionError(Exception):
    """Several statements, or a statement other than SELECT."""


def question_sql(connection: duckdb.DuckDBPyConnection, kind: str, text: str) -> tuple[str, list[str]]:
    """The query for `text`, with its values.

    Raises:
        NoConditionError: it is not a condition.
    """
    if kind == "said":
        return "SELECT DISTINCT episode_id FROM steps WHERE contains(lower(response_text), ?)", [text.lower()]
    sql = f"SELECT DISTINCT episode_id FROM episodes WHERE (\n{text}\n)"  # noqa: S608 - locked and read-only
    statements = connection.extract_statements(sql)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise NoConditionError("enter a condition as after WHERE, for example: shaped_reward > 0.5")
    return sql, []


def _refusal(error: duckdb.Error) -> str:
    """Its first line, and its suggestions."""
    first, *others = str(error).strip().splitlines()
    proposed = [line.strip() for line in others if line.startswith(("Candidate bindings:", "Did you mean"))]
    return ". ".join(line.rstrip("!.") for line in (first, *proposed))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
