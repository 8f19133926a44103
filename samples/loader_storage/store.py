"""A slow disk for one machine: a server thread that hands out records over a socket, at most RATE bytes a second in all.

A reader blocks in recv as it would in read() on a slow disk or network share; no CPU time is spent on waiting.
"""

import os
import socket
import tempfile
import threading
import time
from pathlib import Path

RECORD = 64 * 1024
RATE = 8e6  # bytes a second, as a busy network share or a spinning disk under random reads


def serve():
    """Start the store; returns the path of its socket."""
    path = str(Path(tempfile.mkdtemp(prefix="store-")) / "socket")
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    line = threading.Lock()
    threading.Thread(target=_accept, args=(server, line), daemon=True).start()
    return path


def _accept(server, line):
    while True:
        client, _ = server.accept()
        threading.Thread(target=_answer, args=(client, line), daemon=True).start()


def _answer(client, line):
    with client:
        while request := client.recv(1):
            with line:  # one head: readers queue
                time.sleep(RECORD / RATE)
            client.sendall(request * RECORD)


class Reader:
    """One connection a process, opened at the first read so that workers do not share one."""

    def __init__(self, path):
        self.path, self.pid, self.socket = path, 0, None

    def read(self, number):
        if self.pid != os.getpid():
            self.socket, self.pid = socket.socket(socket.AF_UNIX), os.getpid()
            self.socket.connect(self.path)
        self.socket.sendall(bytes([number % 256]))
        left, parts = RECORD, []
        while left:
            part = self.socket.recv(left)
            left -= len(part)
            parts.append(part)
        return b"".join(parts)
