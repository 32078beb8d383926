"""Bearer tokens from a file, one per line, so that an old and a new token are both valid while clients migrate.

The file is reread when it changes, checked at most once a second; if it becomes unreadable or empty, the last tokens
stay valid. Tokens are compared by digest in constant time, always all of them, and never appear in logs or errors.
"""

import hashlib
import hmac
import time
from collections.abc import Callable
from pathlib import Path

SHORTEST = 16  # characters
EVERY = 1.0  # seconds between checks of the file


class Tokens:
    """The accepted tokens.

    Args:
        path: a file with one token per line; empty lines and lines that begin with `#` are skipped.
        clock: a monotonic clock.

    Example:
        >>> tokens = Tokens("serve.tokens")                                             # doctest: +SKIP
        >>> tokens.accept("Bearer 0123456789abcdef")                                    # doctest: +SKIP
        True
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.clock = Path(path), clock
        self._stamp, self._looked = self._stat(), clock()  # before reading: what is written meanwhile is read again
        self._digests = self._read()

    def accept(self, header: str | None) -> bool:
        """Return True if an Authorization header carries one of the tokens."""
        if self.clock() - self._looked >= EVERY:
            self.refresh()
        scheme, _, token = (header or "").partition(" ")
        given = _digest(token.strip().encode("latin-1", "replace"))  # the bytes that came
        found = [hmac.compare_digest(given, known) for known in self._digests]
        return any(found) and scheme.lower() == "bearer"

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        self._looked = self.clock()
        stamp = self._stat()
        if stamp is None or stamp == self._stamp:
            return
        try:
            self._digests, self._stamp = self._read(), stamp
        except ValueError:
            return  # half-written: keep the old tokens until the file is complete

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[bytes]:
        try:
            lines = [line.strip() for line in self.path.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{self.path}: the tokens cannot be read: {error}") from error
        tokens = [line for line in lines if line and not line.startswith("#")]  # an indented comment is no token
        if not tokens or min(map(len, tokens)) < SHORTEST:
            raise ValueError(
                f"{self.path}: expected at least one token, each of {SHORTEST} characters or more; "
                "hint: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
        return [_digest(token.encode()) for token in tokens]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
