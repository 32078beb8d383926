"""The same core on Ray Serve; needs Ray, and some seconds."""

from pathlib import Path

import pytest

from loka.serving.ray_app import build_app, run

from .client import get, post
from .small import make_ranker


def test_what_cannot_be_honoured_is_refused() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ValueError, match="at least one"):
        build_app({"folder": "x"}, sla=0.1, replicas=0)
    with pytest.raises(ValueError, match="needs a token"):
        run({"folder": "x"}, sla=0.1, host="0.0.0.0", port=1, token_file=None, replicas=1)


@pytest.mark.slow
def test_two_replicas_answer(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    from ray import serve

    make_ranker(tmp_path / "ranker")
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-the-test\n")
    try:
        run(
            {"folder": str(tmp_path / "ranker"), "rows": (8, 32)},
            sla=5.0, host="127.0.0.1", port=8299, token_file=str(tokens), replicas=2, wait=False,
        )  # fmt: skip
        url, features = "http://127.0.0.1:8299", {"age": 3, "price": [1.0, 2.0], "user": 7, "item": [1, 2], "seen": []}
        assert post(url, {"features": features})[0] == 401
        answers = [post(url, {"features": features}, authorization="Bearer a-token-of-the-test") for _ in range(6)]
        assert [status for status, _, _ in answers] == [200] * 6
        assert len({str(body["scores"]) for _, _, body in answers}) == 1
        assert post(url, {"features": {}}, authorization="Bearer a-token-of-the-test")[0] == 400
        assert get(url, "/v2/health/ready")[0] == 200
    finally:
        serve.shutdown()
        ray.shutdown()
