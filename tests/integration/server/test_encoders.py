"""Vectors and scores through every route that has them, over models whose answers say what came to
them: the length of a text, its first and last token, where its second segment begins."""

from __future__ import annotations

import base64
import math
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import shapes
from penstock.server.pipeline.encoding import texts as encode_texts
from penstock.testing.fake_server import add_encoder, add_model, serving, watch_bookings
from penstock.testing.fake_worker import FakeModel, lives
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WINDOW = 64
DIMENSIONS = 64  # of `random:tiny-llama`


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home: Path = tmp_path_factory.mktemp("home")
    add_model(home, "llm")
    add_encoder(home, "embedder", FakeModel(context=WINDOW))
    add_encoder(home, "reranker", FakeModel(context=WINDOW), scores=True)
    add_encoder(home, "slow", FakeModel(step_s=0.2))
    add_encoder(home, "mortal", FakeModel(die_at_token=0, bad_lives=1))
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with (
        serving(home, models_step_sequences=4) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def begin(home: Path) -> int:
    """The special token before every text."""
    token = Tokenizer.from_folder(home / "models" / "embedder").token_id(shapes.BEGIN)
    assert token is not None
    return token


def ask(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text[:1000]
    return answer.json()


def embed(client: httpx.Client, given: Any, status: int = 200, **more: Any) -> Any:
    return ask(client, "/v1/embeddings", status, **{"model": "embedder", "input": given, **more})


def vectors(said: Any) -> list[list[float]]:
    assert [row["index"] for row in said["data"]] == list(range(len(said["data"])))
    return [row["embedding"] for row in said["data"]]


def test_texts_and_token_ids(client: httpx.Client, begin: int) -> None:
    (one,) = vectors(embed(client, "abc"))
    assert one[:4] == [4, begin, ord("c"), -1] and len(one) == DIMENSIONS
    said = embed(client, ["abc", "de"])
    assert [v[:3] for v in vectors(said)] == [[4, begin, ord("c")], [3, begin, ord("e")]]
    assert said["model"] == "embedder"
    assert said["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    # Nothing is added to ids.
    assert [v[:3] for v in vectors(embed(client, [5, 6]))] == [[2, 5, 6]]
    assert [v[:3] for v in vectors(embed(client, [[5, 6], [7]]))] == [[2, 5, 6], [1, 7, 7]]


def test_many_texts_come_back_in_order(client: httpx.Client) -> None:
    given = ["x" * (1 + number % 40) for number in range(300)]
    assert [v[0] for v in vectors(embed(client, given))] == [len(text) + 1 for text in given]


def test_base64_and_fewer_dimensions(client: httpx.Client) -> None:
    said = embed(client, "abc", encoding_format="base64", dimensions=3)
    raw = base64.b64decode(said["data"][0]["embedding"])
    assert struct.unpack("<3f", raw) == tuple(vectors(embed(client, "abc", dimensions=3))[0])
    refusal = embed(client, "abc", 400, dimensions=DIMENSIONS + 1)["error"]
    assert refusal["param"] == "dimensions" and f"have {DIMENSIONS}" in refusal["message"]


def test_prompts_are_the_callers(client: httpx.Client) -> None:
    (plain,), (prompted,) = (
        vectors(embed(client, "ab")),
        vectors(embed(client, "ab", prompt_name="query")),
    )
    assert prompted[0] == plain[0] + len("q:")
    assert vectors(embed(client, "ab", input_type="query"))[0] == prompted
    refusal = embed(client, "ab", 400, prompt_name="poem")["error"]
    assert "its files name: document, query" in refusal["message"]
    embed(client, [1, 2], 400, prompt_name="query")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "is an empty list"),
        (["a", 1], "mixes kinds"),
        ([[1], 2], "mixes kinds"),
        ([100000], "token id 100000"),
        ([[]], "no token at all"),
        ({"a": 1}, "input"),
        (["a"] * 2049, "at most 2048"),
        ([[1]] * 2049, "at most 2048"),
        (None, "input"),
    ],
)
def test_inputs_that_cannot_be_used(client: httpx.Client, given: Any, words: str) -> None:
    error = embed(client, given, 400)["error"]
    assert words in error["message"] and error["param"] == "input"


@pytest.mark.parametrize("given", ["x" * WINDOW, ["ok", "x" * WINDOW], [1] * (WINDOW + 1)])
def test_what_is_longer_than_the_window_is_refused_with_numbers(
    client: httpx.Client, given: Any
) -> None:
    embed(client, "x" * (WINDOW - 1))  # with its special token exactly as long
    error = embed(client, given, 400)["error"]
    assert error["code"] == "context_length_exceeded"
    if not isinstance(given, list) or isinstance(given[0], str):
        assert error["penstock"]["needed_tokens"] == WINDOW + 1
    assert error["penstock"]["limit_tokens"] == WINDOW


def test_cut_where_it_is_asked_for(client: httpx.Client, begin: int) -> None:
    long = "a" * 200 + "b"
    assert vectors(embed(client, long, truncate_prompt_tokens=-1))[0][:3] == [WINDOW, begin, 97]
    assert vectors(embed(client, "abc", truncate_prompt_tokens=3))[0][:3] == [3, begin, ord("b")]
    assert vectors(embed(client, [5, 6, 7], truncate_prompt_tokens=2))[0][:3] == [2, 5, 6]
    assert vectors(embed(client, "abc", truncate_prompt_tokens=500))[0][0] == 4
    for senseless in (0, 1):
        error = embed(client, "abc", 400, truncate_prompt_tokens=senseless)["error"]
        assert "tokens" in error["message"]


def test_models_of_another_kind_are_refused_with_the_right_route(client: httpx.Client) -> None:
    chat = {"model": "embedder", "messages": [{"role": "user", "content": "hi"}]}
    for path, body, kind, route in (
        ("/v1/chat/completions", chat, "embed", "/v1/embeddings"),
        ("/api/chat", chat, "embed", "/v1/embeddings"),
        ("/v1/messages", {**chat, "max_tokens": 5}, "embed", "/v1/embeddings"),
        ("/v1/completions", {"model": "reranker", "prompt": "x"}, "rerank", "/v1/rerank"),
        ("/v1/embeddings", {"model": "llm", "input": "x"}, "generate", "/v1/chat/completions"),
        ("/v1/embeddings", {"model": "reranker", "input": "x"}, "rerank", "/v1/rerank"),
        ("/api/embed", {"model": "llm", "input": "x"}, "generate", "/v1/chat/completions"),
        (
            "/v1/rerank",
            {"model": "embedder", "query": "x", "documents": ["y"]},
            "embed",
            "/v1/embeddings",
        ),
        ("/v1/score", {"model": "llm", "text_1": "x", "text_2": "y"}, "generate", "/v1/chat"),
    ):
        text = str(ask(client, path, 400, **body)["error"])
        assert f"of the kind {kind!r}" in text.replace("\\", "") and route in text, path


def test_models_are_listed_with_their_kind(client: httpx.Client) -> None:
    rows = {row["id"]: row for row in client.get("/v1/models").json()["data"]}
    assert {name: rows[name]["kind"] for name in ("llm", "embedder", "reranker")} == {
        "llm": "generate",
        "embedder": "embed",
        "reranker": "rerank",
    }
    told = {name: rows["embedder"][name] for name in ("dimensions", "pooling", "prompts")}
    assert told == {"dimensions": DIMENSIONS, "pooling": ["mean"], "prompts": ["document", "query"]}
    assert rows["embedder"]["normalized"] is True and "dimensions" not in rows["llm"]
    assert "embedder" in {row["name"] for row in client.get("/api/tags").json()["models"]}
    shown = ask(client, "/api/show", model="embedder")
    assert shown["capabilities"] == ["embedding"]


def test_ollamas_routes(client: httpx.Client) -> None:
    said = ask(client, "/api/embed", model="embedder", input=["abc", "de"], dimensions=2)
    assert [vector[0] for vector in said["embeddings"]] == [4, 3]
    assert len(said["embeddings"][0]) == 2
    assert said["model"] == "embedder" and said["prompt_eval_count"] == 7
    assert said["total_duration"] > 0 and said["load_duration"] >= 0
    # Longer texts are cut to what the model's author has in mind, or refused.
    assert ask(client, "/api/embed", model="embedder", input="x" * 500)["embeddings"][0][0] == 32
    assert ask(client, "/api/embed", model="embedder", input="x" * 40)["embeddings"][0][0] == 32
    refusal = ask(client, "/api/embed", 400, model="embedder", input="x" * 500, truncate=False)
    assert f"{WINDOW} tokens" in refusal["error"]
    long = ask(client, "/api/embed", model="embedder", input="x" * 40, truncate=False)
    assert long["embeddings"][0][0] == 41
    old = ask(client, "/api/embeddings", model="embedder", prompt="abc")
    assert old["embedding"][0] == 4 and len(old) == 1
    # Without a text the model is only loaded.
    assert ask(client, "/api/embed", model="embedder")["embeddings"] == []
    assert ask(client, "/api/embeddings", model="embedder", prompt="")["embedding"] == []


def rank(client: httpx.Client, path: str = "/v1/rerank", **more: Any) -> list[dict[str, Any]]:
    body = {"model": "reranker", "query": "qq", "documents": ["a", "cccc", "bb"], **more}
    results: list[dict[str, Any]] = ask(client, path, **body)["results"]
    return results


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_back_best_first(client: httpx.Client, path: str) -> None:
    # A pair: a special token before each text. The longest is the best here.
    assert rank(client, path) == [
        {"index": 1, "relevance_score": 8.0},
        {"index": 2, "relevance_score": 6.0},
        {"index": 0, "relevance_score": 5.0},
    ]
    assert [row["index"] for row in rank(client, path, top_n=2)] == [1, 2]
    objects = [{"text": "a"}, {"text": "b"}, "cc"]
    shown = rank(client, path, documents=objects, return_documents=True)
    assert [row["document"]["text"] for row in shown] == ["cc", "a", "b"]  # ties by place


def test_the_document_gives_way_not_the_query(client: httpx.Client) -> None:
    long = ["x" * 200, "y"]
    body: dict[str, Any] = {"model": "reranker", "query": "q" * 30, "documents": long}
    error = ask(client, "/v1/rerank", 400, **body)["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "documents")
    cut = ask(client, "/v1/rerank", **body, truncation=True)
    assert [row["relevance_score"] for row in cut["results"]] == [WINDOW, 33]
    assert rank(client, documents=long, query="q" * 30, truncate_prompt_tokens=40) == [
        {"index": 0, "relevance_score": 40.0},
        {"index": 1, "relevance_score": 33.0},
    ]
    each = rank(client, documents=long, query="q" * 30, max_tokens_per_doc=5)
    assert [row["relevance_score"] for row in each] == [37.0, 33.0]
    # A query that leaves nothing for documents.
    body["query"] = "q" * 100
    assert ask(client, "/v1/rerank", 400, **body, truncation=True)["error"]["param"] == "documents"


@pytest.mark.parametrize(
    "changes",
    [
        {"documents": []},
        {"documents": ["a"] * 2049},
        {"documents": [{"image": "x"}]},
        {"documents": [1]},
        {"top_n": 0},
        {"rank_fields": ["title"]},
        {"query": None},
    ],
)
def test_rerank_requests_that_cannot_be_used(client: httpx.Client, changes: dict[str, Any]) -> None:
    body = {"model": "reranker", "query": "q", "documents": ["a"], **changes}
    error = ask(client, "/v1/rerank", 400, **body)["error"]
    assert next(iter(changes)) in error["param"]


def test_scores_as_vllm_has_them(client: httpx.Client) -> None:
    def scores(first: Any, second: Any) -> list[float]:
        said = ask(client, "/v1/score", model="reranker", text_1=first, text_2=second)
        assert said["object"] == "list" and said["data"][0]["object"] == "score"
        return [row["score"] for row in said["data"]]

    assert scores("a", "bb") == [5]
    assert scores("a", ["bb", "c"]) == [5, 4]
    assert scores(["a", "aaa"], ["bb", "c"]) == [5, 6]
    error = ask(client, "/v1/score", 400, model="reranker", text_1=["a", "b"], text_2=["c"])
    assert "`text_1` has 2 texts and `text_2` 1" in error["error"]["message"]


def test_scores_of_an_embedder_are_cosines(client: httpx.Client) -> None:
    said = ask(client, "/v1/score", model="embedder", text_1="a", text_2=["a", "bcdefgh"])
    same, other = (row["score"] for row in said["data"])
    assert same == pytest.approx(1)
    one, two = vectors(embed(client, ["a", "bcdefgh"]))
    product = sum(x * y for x, y in zip(one, two, strict=True))
    assert other == pytest.approx(product / math.hypot(*one) / math.hypot(*two))
    assert said["usage"]["prompt_tokens"] == 2 + 8  # each text once


def test_a_worker_that_dies_is_replaced_and_the_request_answered(
    client: httpx.Client, home: Path
) -> None:
    assert vectors(embed(client, ["a", "bb"], model="mortal"))[1][0] == 3
    assert lives(home / "models" / "mortal") == 2


def test_a_client_that_leaves_takes_its_texts_along(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/embeddings", json={"model": "slow", "input": ["x"] * 500}, timeout=1.5)
    deadline = time.monotonic() + 30
    while client.get("/admin/api/requests").json():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (row,) = rows(client, "slow")
    assert row["requests"] == 0 and row["leases"] == 0


def rows(client: httpx.Client, name: str) -> list[dict[str, Any]]:
    return [row for row in client.get("/admin/api/models").json() if row["name"] == name]


def test_a_short_request_does_not_wait_for_all_of_a_long_one(client: httpx.Client) -> None:
    embed(client, "warm", model="slow")
    ended: dict[str, float] = {}

    def send(name: str, count: int) -> None:
        httpx.post(
            f"{client.base_url}/v1/embeddings",
            json={"model": "slow", "input": ["x"] * count},
            timeout=60,
        ).raise_for_status()
        ended[name] = time.monotonic()

    long = threading.Thread(target=send, args=("long", 150))  # 37 steps or more
    long.start()
    time.sleep(0.5)
    send("short", 1)
    long.join()
    assert ended["long"] - ended["short"] > 1.5


def test_an_encoder_lives_beside_a_model_that_generates(client: httpx.Client) -> None:
    body: dict[str, Any] = {
        "model": "llm",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
    }
    ask(client, "/v1/chat/completions", **body)
    embed(client, "a")
    ask(client, "/v1/rerank", model="reranker", query="q", documents=["d"])
    (row,) = rows(client, "embedder")
    assert (row["state"], row["context"], row["kv_bytes"]) == ("ready", WINDOW, 0)
    assert rows(client, "llm")[0]["state"] == "ready"


def test_what_results_take_is_booked_and_bounded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = watch_bookings(monkeypatch)
    monkeypatch.setattr(encode_texts, "_TEXT_BYTES", 1000)
    with serving(home) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        embed(client, ["abc"] * 200)
        assert max(held) > 200 * (1000 + DIMENSIONS * 26)
        used = client.get("/admin/api/memory").json()["requests"]
        assert used["used_bytes"] < 10_000  # all of it is back
    with (
        serving(home, server_max_bodies=1 << 20) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        embed(client, ["abc"] * 10)
        monkeypatch.setattr(
            "penstock.server.protocols.encoders.embeddings.vector_bytes", lambda *_, **__: 1 << 20
        )
        error = embed(client, ["abc"] * 100, 400)["error"]
        assert "send fewer of `input` at once" in error["message"]
