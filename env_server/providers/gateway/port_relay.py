"""Runs inside a guest, with its own Python and only the standard library: transfers bytes between ports of the guest's
loopback and files of one folder. `port_tunnel.py` is the other end and sends the text of this file.

`in-N` is written by the other end, `out-N` by this program, N from 0 for both, each one JSON object:

    in-N   {"records": [[connection, [port, ...], base64 or null], ...], "num_fetched": number of out-N files fetched}
    out-N  [connection, base64 or null]

null ends that direction. The first record of a connection opens it, at the first port that answers. A file in-N that is
written twice is read once."""

import base64
import json
import os
import shutil
import socket
import struct
import sys
import threading
import time

IDLE_LIMIT_S = 60.0
CONNECT_LIMIT_S = 5.0
WRITE_LIMIT_S = 10
PARTIAL_LIMIT_S = 10.0
"""How long a file may be incomplete."""
READ_BYTES = 512 * 1024
MAX_HELD_BYTES = 8 * 1024 * 1024
"""Limit of data that has not been fetched; beyond it the ports are not read."""
BUSY_S, IDLE_S = 0.005, 0.05
"""Interval between two polls for the next file: after the first connection, and before it."""


class Relay:
    def __init__(self, folder):
        self.folder = folder
        self.changed = threading.Condition()
        self.sockets = {}
        self.held = {}
        self.num_written = 0

    def serve(self):
        number, read_at = 0, time.monotonic()
        while time.monotonic() - read_at < IDLE_LIMIT_S:
            order = self.look(number)
            if order is None:
                time.sleep(BUSY_S if self.sockets else IDLE_S)
                continue
            number, read_at = number + 1, time.monotonic()
            self.forget(order["num_fetched"])
            for record in order["records"]:
                self.take(*record)

    def look(self, number):
        """The next file in, removed once it is complete; None if it does not exist yet."""
        path = os.path.join(self.folder, f"in-{number}")
        until = time.monotonic() + PARTIAL_LIMIT_S
        while os.path.exists(path):
            try:
                with open(path, encoding="utf-8") as file:
                    order = json.load(file)
                os.unlink(path)
                return order
            except ValueError:
                if time.monotonic() > until:
                    raise
                time.sleep(BUSY_S)
        return None

    def forget(self, num_fetched):
        with self.changed:
            for number in [each for each in self.held if each < num_fetched]:
                del self.held[number]
                os.unlink(os.path.join(self.folder, f"out-{number}"))
            self.changed.notify_all()

    def take(self, connection, ports, data):
        if connection not in self.sockets:
            self.sockets[connection] = self.open(connection, ports)
        known = self.sockets[connection]
        if known is None:
            return
        try:
            if data is None:
                known.shutdown(socket.SHUT_WR)
            else:
                known.sendall(base64.b64decode(data))
        except OSError:
            known.close()

    def open(self, connection, ports):
        for port in ports:
            try:
                opened = socket.create_connection(("127.0.0.1", port), CONNECT_LIMIT_S)
            except OSError:
                continue
            opened.settimeout(None)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", WRITE_LIMIT_S, 0))
            threading.Thread(target=self.read, args=(connection, opened), daemon=True).start()
            return opened
        self.put(connection, b"")
        return None

    def read(self, connection, opened):
        while True:
            try:
                data = opened.recv(READ_BYTES)
            except OSError:
                data = b""
            self.put(connection, data)
            if not data:
                opened.close()
                return

    def put(self, connection, data):
        with self.changed:
            self.changed.wait_for(lambda: sum(self.held.values()) < MAX_HELD_BYTES)
            number = self.num_written
            self.num_written += 1
            self.held[number] = len(data)
            path = os.path.join(self.folder, f"out-{number}")
            with open(path + ".part", "w", encoding="utf-8") as file:
                json.dump([connection, base64.b64encode(data).decode() if data else None], file)
            os.rename(path + ".part", path)


def main(folder):
    os.makedirs(folder, mode=0o700, exist_ok=True)
    try:
        Relay(folder).serve()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # without waiting for threads


if __name__ == "__main__":
    main(*sys.argv[1:])
