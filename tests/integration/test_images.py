"""Images through HTTP on every protocol to a real worker, and what becomes of hostile ones."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock import shapes
from penstock.testing import pictures, tiny_vision
from penstock.testing.served import served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SEEING, TEXT = "seeing", "text"
PIXELS = 4_000_000
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home: Path = tmp_path_factory.mktemp("home")
    (home / "models" / TEXT).mkdir(parents=True)
    shapes.write_folder("random:tiny-llama", home / "models" / TEXT)
    tiny_vision.save("smolvlm", home / "models" / SEEING)
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    limits = {
        "PENSTOCK_MODELS_IMAGE_PIXELS": str(PIXELS),
        "PENSTOCK_MODELS_IMAGE_FILE_BYTES": str(4 << 20),
        "PENSTOCK_MODELS_IMAGE_BYTES": str(1 << 20),
        "PENSTOCK_MODELS_STEP_TOKENS": "128",
        "PENSTOCK_MODELS_STEP_SEQUENCES": "16",
        "PENSTOCK_SERVER_MAX_IMAGES": "4",
    }
    with (
        served(home, home / "log", "--memory=2GiB", environment=limits) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        yield client


def ask(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text[:1000]
    return answer.json()


def part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": pictures.as_url(data)}}


def chat(client: httpx.Client, *parts: Any, status: int = 200, model: str = SEEING) -> Any:
    content = [{"type": "text", "text": one} if isinstance(one, str) else one for one in parts]
    messages = [{"role": "user", "content": content}]
    how: dict[str, Any] = {"model": model, "max_tokens": NEW_TOKENS, "temperature": 0}
    return ask(client, "/v1/chat/completions", status, messages=messages, **how)


def test_every_protocol_gives_what_transformers_gives(client: httpx.Client, home: Path) -> None:
    data = pictures.file_of(pictures.noise(40, 24), "PNG")
    prompts = tiny_vision.Prompts(home / "models" / SEEING)
    prompt = prompts.of(prompts.ids("user: "), data, prompts.ids("Well?\nassistant: "))
    expected = prompts.text(prompts.greedy(prompt, NEW_TOKENS).tokens)
    said = chat(client, part(data), "Well?")
    assert said["choices"][0]["message"]["content"] == expected
    assert said["usage"]["prompt_tokens"] == len(prompt.ids)

    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "Well?"}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": blocks}]
    how: dict[str, Any] = {"model": SEEING, "max_tokens": NEW_TOKENS, "temperature": 0}
    said = ask(client, "/v1/messages", messages=messages, **how)
    assert said["content"][0]["text"] == expected
    counted = ask(client, "/v1/messages/count_tokens", messages=messages, model=SEEING)
    assert counted["input_tokens"] == len(prompt.ids)

    options = {"num_predict": NEW_TOKENS, "temperature": 0}
    message = {"role": "user", "content": "Well?", "images": [encoded]}
    how = {"model": SEEING, "stream": False, "options": options}
    assert ask(client, "/api/chat", messages=[message], **how)["message"]["content"] == expected
    said = ask(client, "/api/generate", prompt="Well?", images=[encoded], **how)
    assert said["response"] == expected

    parts = [
        {"type": "input_image", "image_url": pictures.as_url(data)},
        {"type": "input_text", "text": "Well?"},
    ]
    asked: dict[str, Any] = {
        "model": SEEING,
        "max_output_tokens": NEW_TOKENS,
        "temperature": 0,
        "store": False,
    }
    said = ask(client, "/v1/responses", input=[{"role": "user", "content": parts}], **asked)
    assert said["output"][0]["content"][0]["text"] == expected


def test_ordinary_images_are_counted_before_and_served(client: httpx.Client) -> None:
    for name, data in pictures.ordinary():
        messages = [{"role": "user", "content": [part(data), {"type": "text", "text": "Well?"}]}]
        plan = ask(client, "/v1/plan", model=SEEING, messages=messages)
        said = chat(client, part(data), "Well?")
        assert said["usage"]["prompt_tokens"] == plan["prompt_tokens"], name
        tall = name.startswith("rotated")
        if "x" not in name and name != "interlaced":
            size = plan["images"][0]["width"], plan["images"][0]["height"]
            assert size == ((24, 40) if tall else (40, 24)), name


def test_a_rotated_image_is_seen_upright(client: httpx.Client) -> None:
    image = pictures.noise(40, 24, seed=3)
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise
    turned = chat(client, part(pictures.file_of(image, "PNG", exif=exif)), "Well?")
    upright = image.rotate(-90, expand=True)
    straight = chat(client, part(pictures.file_of(upright, "PNG")), "Well?")
    assert turned["choices"][0]["message"] == straight["choices"][0]["message"]
    other = chat(client, part(pictures.file_of(image, "PNG")), "Well?")
    assert other["choices"][0]["message"] != straight["choices"][0]["message"]


def test_hostile_images_cost_one_request_each(client: httpx.Client) -> None:
    good = pictures.file_of(pictures.noise(40, 24), "PNG")
    before = chat(client, part(good), "Well?")["choices"][0]["message"]
    cases = list(pictures.hostile())

    def send(case: tuple[str, bytes, str]) -> Any:
        return chat(client, part(case[1]), "Well?", status=400)

    with ThreadPoolExecutor(8) as pool:
        beside = pool.submit(chat, client, part(good), "Well?")
        refusals = list(pool.map(send, cases))
    for (name, _, words), refusal in zip(cases, refusals, strict=True):
        error = refusal["error"]
        assert words in error["message"] and "messages[0].content[0]" in error["message"], name
    assert beside.result()["choices"][0]["message"] == before
    assert chat(client, part(good), "Well?")["choices"][0]["message"] == before
    (row,) = (m for m in client.get("/admin/api/models").json() if m["name"] == SEEING)
    assert row["state"] == "ready"


def test_limits_are_told_with_numbers(client: httpx.Client) -> None:
    small = part(pictures.file_of(pictures.noise(4, 4), "PNG"))
    error = chat(client, *[small] * 5, status=400)["error"]
    assert "server.max_images" in error["message"] and error["penstock"]["limit"] == 4
    large = pictures.file_of(pictures.noise(2001, 2001).convert("1"), "PNG")
    error = chat(client, part(large), status=400)["error"]
    assert error["penstock"] == {"needed_pixels": 2001 * 2001, "limit_pixels": PIXELS}
    heavy = part(pictures.file_of(pictures.noise(1300, 1200), "PNG"))
    error = chat(client, heavy, status=400)["error"]
    assert "models.image_file_bytes" in error["message"]
    # More images than the window has tokens for.
    error = chat(client, "x" * 990, small, status=400)["error"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/cat.png", "fetches nothing"),
        ("file:///etc/passwd", "fetches nothing"),
        ("data:image/png,rawbytes", "not in base64"),
        ("data:text/html;base64,PGI+", "no image"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,A", "not valid base64"),
        ("", "fetches nothing"),
    ],
)
def test_addresses_that_are_no_image(client: httpx.Client, url: str, words: str) -> None:
    error = chat(client, {"type": "image_url", "image_url": {"url": url}}, status=400)["error"]
    assert words in error["message"] and error["param"] == "messages[0].content[0].image_url"


def test_a_model_of_text_says_so(client: httpx.Client) -> None:
    image = part(pictures.file_of(pictures.noise(4, 4), "PNG"))
    error = chat(client, image, "Well?", status=400, model=TEXT)["error"]
    assert "takes text only" in error["message"]


def test_images_in_other_places_are_refused(client: httpx.Client) -> None:
    image = part(pictures.file_of(pictures.noise(4, 4), "PNG"))
    messages = [{"role": "system", "content": [image]}, {"role": "user", "content": "Well?"}]
    error = ask(client, "/v1/chat/completions", 400, model=SEEING, messages=messages)["error"]
    assert "messages of the role user" in error["message"]
    # A text that has the mark of an image, beside one.
    error = chat(client, image, "see <image> there", status=400)["error"]
    assert "2 times '<image>'" in error["message"]


def test_images_of_a_tools_result_stand_behind_it(client: httpx.Client) -> None:
    data = base64.b64encode(pictures.file_of(pictures.noise(8, 8), "PNG")).decode()
    image = {"type": "image", "source": {"type": "base64", "data": data}}
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    said = ask(client, "/v1/messages", model=SEEING, max_tokens=2, messages=messages)
    assert said["usage"]["output_tokens"] == 2
