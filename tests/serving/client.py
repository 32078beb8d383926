"""A plain client for the tests: one connection per call, http.client underneath."""

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit


def call(
    url: str, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        found = connection.getresponse()
        return found.status, {k.lower(): v for k, v in found.getheaders()}, found.read()
    finally:
        connection.close()


def post(url: str, value: Any, path: str = "/v1/recommend", **headers: str) -> tuple[int, dict[str, str], Any]:
    named = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    status, found, body = call(url, "POST", path, data, named)
    return status, found, json.loads(body) if found.get("content-type") == "application/json" else body


def get(url: str, path: str, **headers: str) -> tuple[int, Any]:
    status, _, body = call(url, "GET", path, None, headers)
    return status, body


def dial(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 80), timeout=30)


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
