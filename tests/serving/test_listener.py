"""What leaves a connection, and when."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import loka
from loka.serving.listener import Whole

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire:
    """A transport that writes down what it is told."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def write_eof(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def test_head_and_body_leave_in_one_write() -> None:
    wire = Wire()
    whole = Whole(wire)
    for _ in range(2):
        whole.write(HEAD)
        whole.write(b"{}")
        whole.flush()
    assert wire.written == [HEAD + b"{}"] * 2


def test_what_is_complete_without_a_body_does_not_wait_for_one() -> None:
    wire = Wire()
    whole = Whole(wire)
    whole.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert wire.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    whole.write(HEAD)  # the answer to a HEAD
    assert len(wire.written) == 1
    whole.flush()
    assert wire.written[1:] == [HEAD]
    whole.write(HEAD)
    whole.close()
    assert wire.written[2:] == [HEAD]
    assert whole.is_closing()


KEPT = """
import socket, sys, time
from loka.serving.keeper import Keeper

class Transport:
    def __init__(self, sock):
        self.sock = sock
    def get_extra_info(self, name):
        return self.sock

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
keeper = Keeper() if sys.argv[1] == "kept" else None
kept = [listener.accept()[0] for _ in range(2)]
for sock in kept:
    if keeper:
        keeper.hold(Transport(sock))
kept[1].shutdown(socket.SHUT_WR)
time.sleep(0.5)
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="keepers are for Linux")
@pytest.mark.parametrize("how", ["kept", "alone"])
def test_a_killed_process_ends_a_kept_connection_without_a_reset(how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(loka.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-c", KEPT, how], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    unread, ended, waiting = (socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3))
    for sock in (unread, waiting):  # the last one is not even accepted
        sock.sendall(b"a request that nobody reads")
    assert process.stdout.readline() == b"held\n"
    assert ended.recv(1) == b""  # what the server ends is over, kept or not
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    for sock in (unread, waiting):
        if how == "kept":
            assert sock.recv(1) == b""
        else:
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
    process.stdout.close()
