"""The process that computes metrics, one after the other. A request is pickled by the server, which this process
trusts. An answer is JSON, because a metric reads data of a policy, and the server must not unpickle anything derived
from it.

The kernel enforces the limits, because a regular expression search cannot be interrupted from within."""

import json
import math
import pickle
import resource
import signal
import struct
import sys
import time
from typing import Any

from osworld_pipeline.domain.parent import dies_with_parent
from osworld_pipeline.task_schema.metrics import METRICS

LENGTH = struct.Struct("!Q")
MEMORY_LIMIT_BYTES = 2 << 30
"""Limit of the process's address space."""
MAX_ERROR = 300


def main(parent_pid: int, cpu_limit_s: int) -> int:
    """If one metric exceeds `cpu_limit_s`, SIGXCPU ends the process."""
    if not dies_with_parent(signal.SIGKILL, parent_pid=parent_pid):
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while head := sys.stdin.buffer.read(LENGTH.size):
        limit_s = math.ceil(time.process_time()) + cpu_limit_s
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        answer = json.dumps(compute(sys.stdin.buffer.read(LENGTH.unpack(head)[0]))).encode()
        sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()
    return 0


def compute(request: bytes) -> dict[str, Any]:
    """Returns `score`, or `error`, or `is_too_much` if memory did not suffice."""
    try:
        name, arguments, options = pickle.loads(request)  # noqa: S301 - the server's own
        return {"score": float(METRICS[name](*arguments, **options))}
    except MemoryError:
        return {"is_too_much": True}
    except Exception as error:  # noqa: BLE001 - any error is reported to the server, and the process continues
        return {"error": f"{type(error).__name__}: {error}"[:MAX_ERROR]}


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
