"""Connections of a process that is killed end without a reset, so that a proxy sends again what nobody answered.

When a process dies, Linux closes its connections: with FIN, or with RST where bytes lie there unread. HAProxy sends a request again after the first ("empty-response"), and gives up after the second, with an error
to its client. A server that is busy always has requests that it has not read yet. A keeper is a second process, a plain Python of a few megabytes, that is handed a copy of every connection. It does nothing while the server lives. Once the
server is gone, it reads what lies there and closes: FIN. The socket that listens is held too: connections that nobody accepted yet would be reset with it.

    keeper = Keeper()
    keeper.hold(transport)            # on every new connection; end one with transport.write_eof(), since close() leaves the copy open
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
from typing import Any


class Keeper:
    """The second process; it ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._listens = False
            subprocess.Popen([sys.executable, "-E", "-S", __file__], stdin=theirs.fileno(), start_new_session=True)

    def hold(self, transport: Any) -> None:
        """Keep a copy of a connection, and with the first one of the socket that listens; if the keeper is gone or behind, the connection is as any other."""
        with contextlib.suppress(OSError):
            connection = transport.get_extra_info("socket")
            fds = [connection.fileno()] + ([] if self._listens else find_listeners(connection.getsockname()[1]))
            socket.send_fds(self._control, [b"+"], fds, socket.MSG_DONTWAIT)
            self._listens = True


def find_listeners(port: int) -> list[int]:
    """File descriptors of this process that listen on the port."""
    out = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket
            found = socket.socket(fileno=int(name))
            try:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                    out.append(int(name))
            finally:
                found.detach()  # it is not ours to close
    return out


def keep(control: socket.socket) -> None:
    """The second process: take connections, let go of those that their peer closed, and when nobody holds the other end of `control`, drain and close the rest."""
    held: dict[int, socket.socket] = {}
    poll = select.epoll()
    poll.register(control, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != control.fileno():
                held.pop(fd).close()  # closing takes it out of the poll
                continue
            message, fds, _, _ = socket.recv_fds(control, 1, 8)
            if not message:
                for left in held.values():
                    drain(left)
                return
            for new in fds:
                held[new] = socket.socket(fileno=new)
                poll.register(new, select.EPOLLRDHUP)


def drain(held: socket.socket) -> None:
    """Read what lies there, of a socket that listens in every connection that nobody accepted, and close."""
    with contextlib.suppress(OSError), held:
        held.setblocking(False)
        if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            while True:
                drain(held.accept()[0])
        while held.recv(1 << 16):
            pass


if __name__ == "__main__":
    keep(socket.socket(fileno=0))
