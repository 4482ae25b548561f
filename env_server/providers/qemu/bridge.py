"""Process 1 of a machine's sandbox: starts QEMU, and forwards each connection of the server's listener to the port that
QEMU forwards to the guest, in the sandbox's own network. It ends with QEMU and with the server, and the sandbox ends
with it. The system's Python runs this file alone, without this package."""

import contextlib
import os
import socket
import sys
import threading

_READ_BYTES = 1 << 16


def main() -> None:
    listener_fd, lifeline_fd, port = map(int, sys.argv[1:4])
    qemu = sys.argv[4:]
    for descriptor in (listener_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    pid = os.posix_spawn(qemu[0], qemu, os.environ)
    listener = socket.socket(fileno=listener_fd)
    threading.Thread(target=serve, args=(listener, port), daemon=True).start()
    threading.Thread(target=end_with_server, args=(lifeline_fd,), daemon=True).start()
    _, status = os.waitpid(pid, 0)
    os._exit(1 if os.waitstatus_to_exitcode(status) else 0)


def serve(listener: socket.socket, port: int) -> None:
    while True:
        connection, _ = listener.accept()
        try:
            connect(connection, port)
        except (OSError, RuntimeError):  # QEMU does not listen yet, or there are too many threads
            connection.close()


def connect(connection: socket.socket, port: int) -> None:
    guest = socket.create_connection(("127.0.0.1", port))
    guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for source, sink in ((connection, guest), (guest, connection)):
        threading.Thread(target=carry, args=(source, sink), daemon=True).start()


def carry(source: socket.socket, sink: socket.socket) -> None:
    """One direction. HTTP closes both directions at once, so the end of one also ends the other."""
    with contextlib.suppress(OSError):
        while data := source.recv(_READ_BYTES):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def end_with_server(lifeline_fd: int) -> None:
    """The server holds the other end, and writes nothing."""
    os.read(lifeline_fd, 1)
    os._exit(1)


if __name__ == "__main__":
    main()
