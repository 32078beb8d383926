import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loka.data import DataError, catalog, loader
from loka.data.download import download

from . import raw

CONTENT = bytes(range(256)) * 4000
SHA = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves CONTENT; can cut connections and ignore ranges."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.cut_after: list[int] = []
        self.ranges = True
        self.status: int | None = None
        self.requests: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.requests.append(asked)
        if self.server.status:
            self.send_error(self.server.status)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header(
                "Content-Range", f"bytes {start}-{len(self.server.content) - 1}/{len(self.server.content)}"
            )
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.cut_after:
            body = body[: self.server.cut_after.pop(0)]
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_download_and_no_second_download(server: Server, tmp_path: Path) -> None:
    seen: list[int] = []
    target = tmp_path / "deep" / "file.bin"
    for _ in range(2):
        download(
            server.url, target, sha256=SHA, size=len(CONTENT), progress=lambda stage, done, total: seen.append(done)
        )
    assert target.read_bytes() == CONTENT
    assert server.requests == [None]
    assert seen[-1] == len(CONTENT)
    assert [path.name for path in target.parent.iterdir()] == ["file.bin"]


def test_a_cut_connection_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cut_after = [300_000, 100_000]
    target = download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))
    assert target.read_bytes() == CONTENT
    assert server.requests == [None, "bytes=300000-", "bytes=400000-"]


def test_a_later_run_resumes(server: Server, tmp_path: Path) -> None:
    server.cut_after = [100_000] * 4
    with pytest.raises(DataError, match=f"got 400000 of {len(CONTENT)} bytes.*again to resume"):
        download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))
    assert not (tmp_path / "file.bin").exists()
    download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))
    assert server.requests[-1] == "bytes=400000-"
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    (tmp_path / "file.bin.part").write_bytes(b"old" * 1000)
    download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [CONTENT[:-1] + b"!", CONTENT + b"more", b"<html>" * 200_000])
def test_a_wrong_checksum_is_refused(server: Server, tmp_path: Path, content: bytes) -> None:
    server.content = content
    with pytest.raises(DataError, match=f"expected {len(CONTENT)} bytes and {SHA}"):
        download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_part_is_found(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"x" * 5000)
    with pytest.raises(DataError, match="discarded"):
        download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))
    download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))


def test_an_existing_other_file_is_not_overwritten(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "file.bin"
    target.write_bytes(b"mine")
    with pytest.raises(DataError, match="move it away"):
        download(server.url, target, sha256=SHA, size=len(CONTENT))
    assert target.read_bytes() == b"mine"
    assert server.requests == []


def test_answers_and_silence_are_named(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(DataError, match="answered 404"):
        download(server.url, tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))
    assert len(server.requests) == 1
    with pytest.raises(DataError, match="got 0 of"):
        download("http://127.0.0.1:1/file.bin", tmp_path / "file.bin", sha256=SHA, size=len(CONTENT))


def test_fetch_raw_then_load(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = raw.write_criteo(tmp_path / "made", rows={"log": 100})
    server.content = (source / "sample_log.tsv").read_bytes()
    digest = hashlib.sha256(server.content).hexdigest()
    remote = catalog.Remote(server.url, "log.tsv", digest, len(server.content))
    entry = catalog.CATALOG["criteo"]
    monkeypatch.setitem(catalog.CATALOG, "criteo", catalog.Entry(**{**entry.__dict__, "remotes": (remote,)}))
    loader.fetch_raw("criteo", root=tmp_path)
    assert len(loader.load("criteo", root=tmp_path).train) == 80
    with pytest.raises(DataError, match="no direct download"):
        loader.fetch_raw("amazon-2014-beauty", root=tmp_path)
