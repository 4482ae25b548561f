"""A worker of the union build: reads the blocks that its parent names over a socket, until the socket closes. It also
closes when the parent dies."""

import os
import signal
from multiprocessing.connection import Connection

from osworld_pipeline.datasets.union.blocks import BlockReader
from osworld_pipeline.datasets.union.forms import ROWS_FOLLOW, Setup
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.without_pandas import spare_pandas


def main(descriptor: int) -> None:
    spare_pandas()
    # Ctrl-C reaches the whole process group; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        setup: Setup = connection.recv()
        output = None if setup.output is None else os.open(setup.output, os.O_WRONLY)
        reader = BlockReader(setup)
        while True:
            block, origin = connection.recv()
            connection.send(reader.read(block, origin))
            del block
            kept, first_line = connection.recv()
            try:
                payload: bytes | PipelineError = reader.write(kept, first_line)
            except PipelineError as error:
                payload = error
            if isinstance(payload, PipelineError):
                connection.send(payload)
            elif output is not None:
                connection.send(len(payload))
                connection.send(_write(output, payload, connection.recv()))
            else:
                connection.send(ROWS_FOLLOW)
                connection.send_bytes(payload)
            del payload
    except (EOFError, ConnectionError, BrokenPipeError):
        return


def _write(output: int, payload: bytes, offset: int) -> OSError | None:
    """Writes at `offset`, in a range of this worker's own; the parent raises the returned error."""
    rest = memoryview(payload)
    try:
        while rest:
            num_bytes = os.pwrite(output, rest, offset)
            offset, rest = offset + num_bytes, rest[num_bytes:]
    except OSError as error:
        return OSError(error.errno, error.strerror)
    return None
