"""What leaves a connection, and when."""

from loka.serving.listener import Whole

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Wire:
    """A transport that writes down what it is told."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

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
