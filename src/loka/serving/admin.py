"""The admin port, on localhost by default: metrics, a live page, reload. None of it is on the public port.

GET  /metrics          Prometheus metrics
GET  /                 the live page;  GET /stats.json is its data
POST /reload           {"folder": "runs/new"}, with two models also "arm"; needs a token if the server has tokens
"""

from importlib.resources import files
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loka.serving import wire
from loka.serving.call import Call
from loka.serving.front import Front
from loka.serving.runner import Refused
from loka.serving.service import Service


class Reload(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of `POST /reload`: the folder of the new model, and the arm it replaces, if there are several."""

    folder: Annotated[str, Meta(min_length=1, max_length=4096)]
    arm: str | None = None


class Admin(Front):
    """The ASGI application of the admin port. If `guarded`, every request needs a token, not only reloads."""

    service: Service

    def __init__(self, front: Front, *, guarded: bool = False) -> None:
        super().__init__(front.service, tokens=front.tokens, limits=front.limits, manage=False, verbose=front.verbose)
        self.guarded = guarded
        self._reloads = wire.Codec(Reload)

    async def _route(self, call: Call) -> None:
        method, path = call.method, call.scope["path"]
        change = method != "GET"
        if (
            (change or self.guarded)
            and self.tokens is not None
            and not self.tokens.accept(call.header(b"authorization"))
        ):
            raise Refused(401, "token", "a valid bearer token is needed")
        if (method, path) == ("GET", "/metrics"):
            text = self.service.telemetry.render().encode()
            await self._write(call, 200, text, [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")])
        elif (method, path) == ("GET", "/stats.json"):
            await self._send(call, 200, self.stats())
        elif (method, path) == ("GET", "/"):
            page = (files("loka.serving") / "live.html").read_bytes()
            policy = b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
            await self._write(call, 200, page, [(b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", policy)])  # fmt: skip
        elif (method, path) == ("POST", "/reload"):
            await self._reload(call)
        else:
            raise Refused(404, "path", "GET /metrics, GET /, POST /reload")

    async def _reload(self, call: Call) -> None:
        call.kind = wire.content_type(call.header(b"content-type"), call.header(b"content-encoding"))
        asked = self._reloads.decode(await self._read_body(call), call.kind)
        if asked.arm is None and len(self.service.runners) > 1:
            names = ", ".join(self.service.runners)
            raise Refused(400, "field", f"several models are served, name the one to replace: {names}", path="$.arm")
        try:
            found = await self.service.reload(asked.arm or self.service.first.arm, asked.folder)
        except ValueError as error:
            raise Refused(409, "kept", str(error)) from error
        await self._send(call, 200, {"arm": asked.arm or self.service.first.arm, **found})

    def stats(self) -> dict[str, Any]:
        """Return the data of the live page."""
        arms = [
            {"arm": arm, "ready": r.ready, "hung": r.hung, "queue": 0 if r.scheduler is None else len(r.scheduler),
             "captured_since_ready": r.captured_since_ready, "name": r.model.name, "version": r.model.version,
             **(self.service.describe_runner(r) if r.scheduler is not None else {})}
            for arm, r in self.service.runners.items()
        ]  # fmt: skip
        return {"sla_ms": 1e3 * self.service.policy.sla, "arms": arms, "seconds": self.service.telemetry.history()}
