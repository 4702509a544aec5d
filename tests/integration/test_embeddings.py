"""A real embedder beside a reranker and a model that generates, in one server of 2 GiB, through
OpenAI's own package: vectors equal those of transformers for each text alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModel

from penstock import shapes
from penstock.testing import tiny_encoders
from penstock.testing.served import served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

DIMENSIONS = 384
_WORDS = (
    *("river", "stone", "music", "engine", "window", "paper", "small", "green", "quickly"),
    *("memory", "water", "steam", "valve", "pressure", "pipe", "gate", "turbine", "lake"),
)
LLM, RERANKER = "llm", "reranker"


@pytest.fixture(scope="module")
def url(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    models = home / "models"
    models.mkdir()
    (models / minilm_folder.name).symlink_to(minilm_folder)
    (models / LLM).mkdir()
    shapes.write_folder("random:tiny-llama", models / LLM)
    tiny_encoders.save("bert", models / RERANKER, scores=True)
    with served(home, home / "log", "--memory=2GiB") as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300) as client:
        yield client


def _texts(count: int, most_words: int) -> list[str]:
    """Of one word to so many, the longest among them."""
    source = random.Random(count)
    lengths = [1, most_words, *(source.randint(1, most_words) for _ in range(count - 2))]
    return [" ".join(source.choices(_WORDS, k=length)) for length in lengths]


def _reference(folder: Path, texts: list[str]) -> NDArray[np.float32]:
    """As sentence-transformers computes it, one text at a time: mean of the rows, normalised."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text).ids])
            mean = model(input_ids=ids).last_hidden_state[0].mean(0)
            found.append((mean / mean.norm()).numpy())
    return np.stack(found)


def _vectors(client: openai.OpenAI, model: str, texts: list[str]) -> NDArray[np.float32]:
    said = client.embeddings.create(model=model, input=texts)
    return np.array([row.embedding for row in said.data], dtype=np.float32)


def _check(client: openai.OpenAI, folder: Path, texts: list[str]) -> None:
    expected = _reference(folder, texts)
    together = _vectors(client, folder.name, texts)
    assert together.shape == (len(texts), DIMENSIONS)
    assert float(np.abs(together - expected).max()) < 1e-5
    with ThreadPoolExecutor(4) as threads:
        alone = list(threads.map(lambda text: _vectors(client, folder.name, [text])[0], texts))
    assert float(np.abs(np.stack(alone) - together).max()) < 1e-6


def test_vectors_equal_transformers(client: openai.OpenAI, minilm_folder: Path) -> None:
    _check(client, minilm_folder, _texts(10, 200))


@pytest.mark.proof
def test_two_hundred_texts_of_up_to_512_tokens(client: openai.OpenAI, minilm_folder: Path) -> None:
    _check(client, minilm_folder, _texts(200, 510))


def test_what_the_package_asks_for(client: openai.OpenAI, minilm_folder: Path) -> None:
    model = minilm_folder.name
    usual = client.embeddings.create(model=model, input="steam in a pipe")  # base64 on the way
    plain = client.embeddings.create(
        model=model, input="steam in a pipe", encoding_format="float", user="somebody"
    )
    assert usual.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-7)
    assert (usual.model, usual.usage.prompt_tokens) == (model, usual.usage.total_tokens)
    few = client.embeddings.create(model=model, input=["a", "b"], dimensions=64)
    assert [len(row.embedding) for row in few.data] == [64, 64]
    assert float(np.linalg.norm(few.data[0].embedding)) == pytest.approx(1, abs=1e-6)
    ids = Tokenizer.from_file(str(minilm_folder / "tokenizer.json")).encode("steam in a pipe").ids
    by_id = client.embeddings.create(model=model, input=[[token for token in ids if token]])
    assert by_id.data[0].embedding == pytest.approx(usual.data[0].embedding, abs=1e-6)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=model, input="stone " * 600)
    assert refused.value.code == "context_length_exceeded"


def test_meaning_is_near_meaning(client: openai.OpenAI, minilm_folder: Path) -> None:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on a couch.", "Interest rates rose."]
    cat, kitten, rates = _vectors(client, minilm_folder.name, texts)
    assert float(cat @ kitten) > 0.5 > float(cat @ rates) + 0.2


def test_scores_equal_transformers(url: str) -> None:
    """Pairs as the tokenizer joins them, with segments."""
    folder = _folder(url, RERANKER)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = tiny_encoders.Reference(folder, scores=True)
    documents = ["a valve.", "steam in a pipe", "x", "a long way from here to the turbine"]
    body = {"model": RERANKER, "query": "where is it?", "documents": documents}
    answer = httpx.post(f"{url}/v1/rerank", json={**body, "raw_scores": True}, timeout=300)
    found = {row["index"]: row["relevance_score"] for row in answer.json()["results"]}
    for number, document in enumerate(documents):
        pair = raw.encode(str(body["query"]), document)
        assert found[number] == pytest.approx(reference.logit(pair.ids, pair.type_ids), abs=1e-5)
    scores = httpx.post(f"{url}/v1/rerank", json=body, timeout=300).json()["results"]
    assert [row["index"] for row in scores] == sorted(found, key=lambda n: -found[n])
    assert all(0 < row["relevance_score"] < 1 for row in scores)  # a probability by default


def _folder(url: str, name: str) -> Path:
    rows = httpx.get(f"{url}/admin/api/catalog", timeout=60).json()["models"]
    return next(Path(row["path"]) for row in rows if row["name"] == name)


def test_all_three_under_load_and_every_byte_comes_back(
    client: openai.OpenAI, url: str, minilm_folder: Path
) -> None:
    def chat(number: int) -> bool:
        said = client.completions.create(model=LLM, prompt=f"Say {number}.", max_tokens=4)
        return said.choices[0].finish_reason in {"stop", "length"}

    def embed(number: int) -> bool:
        vectors = _vectors(client, minilm_folder.name, _texts(3 + number, 30))
        return bool(np.isfinite(vectors).all())

    def rank(number: int) -> bool:
        body = {"model": RERANKER, "query": "where?", "documents": _texts(3 + number, 30)}
        answer = httpx.post(f"{url}/v1/rerank", json=body, timeout=300)
        return len(answer.raise_for_status().json()["results"]) == 3 + number

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(lambda n: (chat, embed, rank)[n % 3](n), range(18)))
    for name in (minilm_folder.name, RERANKER, LLM):
        httpx.post(f"{url}/admin/api/models/{name}/unload", timeout=60).raise_for_status()
    books = httpx.get(f"{url}/admin/api/memory", timeout=60).json()["domains"]["ram"]
    assert not [owner for owner in books["owners"] if owner.startswith("model:")]
    # The profile is there now, and so is the model again when it is asked.
    assert embed(0)
