"""Download a file from its publisher, with a checksum, resuming after an interruption.

The content is written to `<name>.part`. A lost connection or a killed process leaves it there, and the next attempt
requests the rest with an HTTP Range request. If the server ignores the range (answers 200, not 206), the download
starts over. Only a file with the expected size and SHA-256 gets its final name, so a file without `.part` is complete.
An existing file with another checksum is never overwritten: it may be the user's own.
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
    """Fetch `url` into `target` and return it. A no-op if the right file is already there."""
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
                    return  # larger than expected: `_finish` reports it, no need to fetch the rest


def _finish(url: str, part: Path, target: Path, sha256: str, size: int, error: Exception | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have < size:
        reason = f" ({error})" if error else ""
        raise DataError(
            f"{url}: got {have} of {size} bytes{reason}; run the same command again to resume, or download it by hand and use "
            "--source FOLDER"
        )
    found = sha256_of(part)
    if have > size or found != sha256:
        part.unlink()  # a wrong file must not be resumed forever; it is no file of the user
        raise DataError(
            f"{url}: the download has {have} bytes and SHA-256 {found}, expected {size} bytes and {sha256}; it was discarded. "
            "The publisher may have changed the file"
        )
    part.rename(target)
