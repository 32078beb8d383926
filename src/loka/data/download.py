"""Download a file its publisher offers: with a checksum, and resuming after a cut.

The content goes to `<name>.part`; a cut connection, or a killed process, leaves it there, and the next attempt asks for the rest with an
HTTP Range request. A server that ignores the range (answers 200, not 206) makes it start again. Only a file whose size and SHA-256
are as expected gets its final name, so a file without `.part` is complete. A finished file with another checksum is never
overwritten: it may be the user's own.
"""

import hashlib
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from loka.data.faults import DataError
from loka.data.progress import Progress, silent

_PIECE = 1 << 18
_ATTEMPTS = 4
_TIMEOUT_S = 30.0


def download(url: str, target: Path, *, sha256: str, size: int, progress: Progress = silent) -> Path:
    """Fetch `url` into `target` and return it; does nothing when the right file is already there."""
    if target.exists():
        found = sha256_of(target)
        if found != sha256:
            raise DataError(
                f"{target} exists, but its SHA-256 is {found}, expected {sha256}; move it away to download it again"
            )
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    error: Exception | None = None
    for _ in range(_ATTEMPTS):
        try:
            _fetch_rest(url, part, size, progress)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as failure:
            if isinstance(failure, urllib.error.HTTPError) and failure.code < 500:
                raise DataError(f"{url}: the server answered {failure.code} {failure.reason}") from None
            error = failure
            continue
        if part.stat().st_size >= size:
            break
    _finish(url, part, target, sha256, size, error)
    return target


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_rest(url: str, part: Path, size: int, progress: Progress) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have >= size:
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        with part.open("ab" if have and resumed else "wb") as file:
            done = have if resumed else 0
            while piece := response.read(_PIECE):
                file.write(piece)
                done += len(piece)
                progress(f"downloading {part.stem}", done, size)
                if done > size:
                    return  # more than announced: the checksum will name it, there is no need to fetch all of it


def _finish(url: str, part: Path, target: Path, sha256: str, size: int, error: Exception | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have < size:
        reason = f" ({error})" if error else ""
        raise DataError(
            f"{url}: got {have} of {size} bytes{reason}; run the same command again to resume, or download it by hand and use "
            "--from FOLDER"
        )
    found = sha256_of(part)
    if have > size or found != sha256:
        part.unlink()  # resuming a wrong file would never end; nothing of the user's is lost
        raise DataError(
            f"{url}: the download has {have} bytes and SHA-256 {found}, expected {size} bytes and {sha256}; it was discarded. "
            "The publisher may have changed the file"
        )
    part.rename(target)
