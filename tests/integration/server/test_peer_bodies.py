"""Bodies in the shapes that the server tests of llama.cpp and vLLM send, over a fake worker.

Which of their files each list follows is said beside it; docs/clients.md has the commits. The texts
are our own, and so is what is expected where the two servers answer differently.
"""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, mark_tokens, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BEGIN, LEFT, RIGHT, GAP = 256, 300, 301, 302  # the ids of `mark_tokens`
HI = [{"role": "user", "content": "hi"}]
BOOK = [{"role": "system", "content": "Book"}, {"role": "user", "content": "Which one?"}]
PARTS = [{"type": "text", "text": "Which"}, {"type": "text", "text": "one?"}]
THINKER = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "assistant: <think>\n{# </think> #}"
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOL = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {}}}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    home: Path = tmp_path_factory.mktemp("home")
    mark_tokens(add_model(home, "echo"))
    mark_tokens(add_model(home, "fills", FakeModel(answer="return")))
    add_model(home, "thinker", FakeModel(answer="hm\n</think>\n\nWell."), THINKER)
    add_model(home, "small", FakeModel(context=32))
    with (
        serving(home, models_default="echo") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


# --- tokens: llama.cpp's test_tokenize.py, vLLM's serve/tokenize/test_tokenization.py -------------


def test_llama_cpp_tokenize(client: httpx.Client) -> None:
    assert ask(client, "/tokenize", content="ab")["tokens"] == [*b"ab"]
    assert ask(client, "/tokenize", content="ab", add_special=True)["tokens"] == [BEGIN, *b"ab"]
    pieces = ask(client, "/tokenize", content="aé 🤗", with_pieces=True)["tokens"]
    assert all(token["piece"] for token in pieces)


def test_llama_cpp_content_of_texts_and_ids(client: httpx.Client) -> None:
    """Special tokens go before a text that comes first, and before no other."""
    mixed = ["ab", 7, 8, "c", "d", 9]
    assert ask(client, "/tokenize", content=mixed)["tokens"] == [*b"ab", 7, 8, *b"cd", 9]
    said = ask(client, "/tokenize", content=mixed, add_special=True)
    assert said["tokens"] == [BEGIN, *b"ab", 7, 8, *b"cd", 9]
    said = ask(client, "/tokenize", content=[7, "ab"], add_special=True)
    assert said["tokens"] == [7, *b"ab"]
    assert ask(client, "/tokenize", content=[])["tokens"] == []
    pieces = ask(client, "/tokenize", content=["a", 98], with_pieces=True)["tokens"]
    assert [token["piece"] for token in pieces] == ["a", "b"]


@pytest.mark.parametrize("content", [["a", 1.5], ["a", None], [-1], [1 << 40], ["x"] * 257, {}])
def test_contents_that_are_refused(client: httpx.Client, content: Any) -> None:
    assert ask(client, "/tokenize", 400, content=content)["error"]["param"].startswith("content")


def test_llama_cpp_parse_special(client: httpx.Client) -> None:
    """The text of a special token is that token; asked to be letters, it is refused."""
    assert ask(client, "/tokenize", content="a<|begin|>b")["tokens"] == [97, BEGIN, 98]
    said = ask(client, "/tokenize", content="a<|begin|>b", parse_special=True)
    assert said["tokens"] == [97, BEGIN, 98]
    for content in ("a<|begin|>b", ["a", 1, "<|begin|>"]):
        refused = ask(client, "/tokenize", 400, content=content, parse_special=False)
        assert refused["error"]["param"] == "parse_special"
    said = ask(client, "/tokenize", content=["a<|", 1], parse_special=False)
    assert said["tokens"] == [*b"a<|", 1]


@pytest.mark.parametrize("added", [True, False, None])
def test_vllm_tokenize_a_prompt(client: httpx.Client, added: bool | None) -> None:
    said = ask(client, "/tokenize", model="echo", prompt="ab", add_special_tokens=added)
    assert said["tokens"] == [*([] if added is False else [BEGIN]), *b"ab"]
    assert said["count"] == len(said["tokens"])


@pytest.mark.parametrize(
    ("generation", "continues", "added"),
    [case for case in product((True, False), repeat=3) if not (case[0] and case[1])],
)
def test_vllm_tokenize_a_chat(
    client: httpx.Client, generation: bool, continues: bool, added: bool
) -> None:
    messages = [*HI, {"role": "assistant", "content": "Sure,"}]
    text = b"user: hi\nassistant: Sure," + (b"" if continues else b"\n")
    said = ask(
        client, "/tokenize", messages=messages, add_generation_prompt=generation,
        continue_final_message=continues, add_special_tokens=added,
        chat_template=None, chat_template_kwargs=None, mm_processor_kwargs=None,
    )  # fmt: skip
    expected = text + (b"assistant: " if generation else b"")
    assert said["tokens"] == [*([BEGIN] if added else []), *expected]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
    ],
)
def test_vllm_tokenize_refusals(client: httpx.Client, body: Any, param: str) -> None:
    assert ask(client, "/tokenize", 400, messages=HI, **body)["error"]["param"] == param


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [True, False, None])
def test_special_tokens_are_added_to_prompts(client: httpx.Client, added: bool | None) -> None:
    """By default to the text of completions, and not to a chat, whose template has written them."""
    completion = ask(client, "/v1/completions", prompt="ab", max_tokens=1, add_special_tokens=added)
    assert completion["usage"]["prompt_tokens"] == 2 + (added is not False)
    chat = ask(client, "/v1/chat/completions", messages=HI, max_tokens=1, add_special_tokens=added)
    assert chat["usage"]["prompt_tokens"] == len("user: hi\nassistant: ") + (added is True)


def test_a_gap_is_filled(client: httpx.Client) -> None:
    """`suffix` of Ollama and of completions: the model's own marks around what is there."""
    body: Any = {"model": "fills", "prompt": "def f():", "suffix": "x"}
    said = ask(client, "/api/generate", **body, stream=False)
    assert (said["response"], said["done_reason"]) == ("return", "stop")
    assert said["prompt_eval_count"] == len("def f():") + len("x") + 3 + 1  # marks, and BEGIN
    streamed = client.post("/api/generate", json=body).text.splitlines()
    assert "".join(json.loads(line)["response"] for line in streamed) == "return"
    completion = ask(client, "/v1/completions", **body)
    assert completion["choices"][0]["text"] == "return"
    assert completion["usage"]["prompt_tokens"] == said["prompt_eval_count"]


def test_the_marks_of_a_gap_are_where_the_model_expects_them(client: httpx.Client) -> None:
    body: Any = {"model": "echo", "prompt": "ab", "suffix": "cd", "stream": False}
    said = ask(client, "/api/generate", **body, options={"num_predict": 1})
    # An echo begins with the prompt's first token, then meets a mark, which ends the answer.
    assert said["context"][: said["prompt_eval_count"]] == [
        BEGIN, LEFT, *b"ab", RIGHT, *b"cd", GAP,
    ]  # fmt: skip


# --- llama.cpp: test_chat_completion.py, test_completion.py --------------------------------------


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"messages": BOOK, "max_tokens": 8}),
        (200, {"messages": [BOOK[0], {"role": "user", "content": PARTS}], "max_tokens": 8}),
        (200, {"messages": BOOK, "max_tokens": 2, "id_slot": 0, "n": 2, "cache_prompt": False}),
        (200, {"messages": BOOK, "max_tokens": 2, "timings_per_token": True, "verbose": False}),
        (200, {"messages": BOOK, "max_tokens": 2, "return_progress": True, "n_keep": 0}),
        (200, {"messages": BOOK, "max_tokens": 2, "logit_bias": {"7": -100}, "seed": 42}),
        (200, {"messages": HI, "max_tokens": 8, "json_schema": SCHEMA}),
        (200, {"messages": HI, "max_tokens": 6, "grammar": 'root ::= "a"{5,5}'}),
        (200, {"messages": HI, "response_format": {"type": "json_object"}, "max_tokens": 8}),
        (
            200,
            {
                "messages": HI,
                "response_format": {"type": "json_object", "schema": SCHEMA},
                "max_tokens": 8,
            },
        ),
        (
            200,
            {
                "messages": [*BOOK, {"role": "assistant", "content": PARTS}],
                "add_generation_prompt": False,
                "continue_final_message": True,
                "max_tokens": 8,
            },
        ),
        (400, {"messages": HI, "grammar": "root ::= this is (not valid"}),
        (400, {"messages": HI, "response_format": {"type": "sound"}}),
        (400, {"messages": HI, "response_format": {"type": "json_object", "schema": 123}}),
        (400, {"messages": None}),
        (400, {"messages": "string"}),
        (400, {"messages": [123]}),
        (400, {"messages": [{}]}),
        (400, {"messages": [{"role": 123}]}),
        (400, {"messages": [{"role": "system", "content": 123}]}),
        (400, {"messages": [{"role": "system", "content": "x"}, {}]}),
        (400, {"model": "small", "messages": BOOK * 20}),
        (400, {"messages": HI, "add_generation_prompt": True, "continue_final_message": True}),
        # Fields of its table that would change the answer.
        (400, {"messages": HI, "n_indent": 4}),
        (400, {"messages": HI, "n_cmpl": 2}),
        (400, {"messages": HI, "return_tokens": True}),
        (400, {"messages": HI, "repeat_last_n": 8192, "frequency_penalty": 0.5}),
        (200, {"messages": HI, "max_tokens": 2, "repeat_last_n": 64, "frequency_penalty": 0.5}),
        (200, {"messages": HI, "max_tokens": 2, "repeat_last_n": 64, "repeat_penalty": 1.0}),
    ],
)
def test_llama_cpp_chat(client: httpx.Client, status: int, body: Any) -> None:
    said = ask(client, "/chat/completions", status, **body)
    assert ("error" in said) == (status != 200)


def test_llama_cpp_log_probabilities(client: httpx.Client) -> None:
    body: Any = {"messages": BOOK, "max_tokens": 5, "logprobs": True, "top_logprobs": 10}
    [choice] = ask(client, "/v1/chat/completions", **body)["choices"]
    told = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in told) == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 10 for entry in told)


def test_llama_cpp_completions(client: httpx.Client) -> None:
    body: Any = {"model": "davinci-002", "prompt": "life is", "max_tokens": 8}
    ask(client, "/v1/completions", 404, **body)  # it serves any name; here a name is a model's
    body["model"] = "echo"
    whole = ask(client, "/v1/completions", **body)["choices"][0]
    streamed = events(client, "/v1/completions", **body)
    assert "".join(each["choices"][0]["text"] for each in streamed) == whole["text"]
    assert whole["finish_reason"] == "length"


def test_llama_cpp_anthropic(client: httpx.Client) -> None:
    """test_compat_anthropic.py: system, parts, results of tools, tools, counting."""
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "seen"}
    turns = [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "text", "text": "Here:"}, result]},
    ]
    said = ask(
        client, "/v1/messages", model="echo", max_tokens=30, system="S", messages=turns,
        tools=[TOOL], stop_sequences=["###"], top_k=40, metadata={"user_id": "u"},
    )  # fmt: skip
    assert said["type"] == "message"
    counted = ask(client, "/v1/messages/count_tokens", model="echo", messages=HI, tools=[TOOL])
    assert counted["input_tokens"] > 5
    kinds = [e["type"] for e in events(client, "/v1/messages", max_tokens=5, messages=HI)]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_llama_cpp_responses(client: httpx.Client) -> None:
    """test_compat_oai_responses.py: a list of messages, whole and streamed."""
    body: Any = {"model": "echo", "input": BOOK, "max_output_tokens": 8, "temperature": 0.8}
    said = ask(client, "/v1/responses", **body)
    assert said["id"].startswith("resp_")
    assert said["output"][0]["id"].startswith("msg_")
    streamed = events(client, "/v1/responses", **body)
    assert streamed[-1]["response"]["output"][0]["content"] == said["output"][0]["content"]


# --- vLLM: openai/completion/test_completion.py, chat_completion/test_chat.py and others ---------


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"prompt": "Hello", "max_tokens": 5, "temperature": 0.0}),
        (200, {"prompt": [0, 0, 0, 0], "max_tokens": 5, "logprobs": 0}),
        (200, {"prompt": [0, 0, 0, 0], "max_tokens": 5, "logprobs": 5}),
        (200, {"prompt": ["a", "b"], "max_tokens": 5, "n": 2, "seed": 42}),
        (200, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1}),
        (200, {"prompt": "Hello", "max_tokens": 2, "allowed_token_ids": [42]}),
        (200, {"prompt": "Hello", "max_tokens": 2, "stream_options": None}),
        (200, {"prompt": "ab", "max_tokens": 2, "structured_outputs": {"regex": "[0-9]{2}"}}),
        (400, {"prompt": [0, 0, 0], "max_tokens": 5, "logprobs": 21}),
        (400, {"prompt": "a", "stream_options": {"include_usage": True}}),
        (400, {"prompt": "a", "prompt_logprobs": 0}),
        (400, {"prompt": "a", "prompt_logprobs": 1}),
        (400, {"prompt": "a", "truncate_prompt_tokens": 4, "truncation_side": "left"}),
        (400, {"prompt": "a", "logprob_token_ids": [7]}),
        (400, {"prompt": "a", "logit_bias": {"9999999": 1}}),
        (400, {"prompt": "a", "use_beam_search": True}),
        (400, {"prompt": "", "add_special_tokens": False}),
    ],
)
def test_vllm_completions(client: httpx.Client, status: int, body: Any) -> None:
    ask(client, "/v1/completions", status, **body)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 0}),
        (200, {"max_completion_tokens": 10, "min_tokens": 10, "temperature": 0.0}),
        (200, {"max_completion_tokens": 5, "structured_outputs": {"choice": ["a", "b"]}}),
        (200, {"max_completion_tokens": 9, "structured_outputs": {"json": SCHEMA}}),
        (200, {"max_completion_tokens": 5, "mm_processor_kwargs": None, "media_io_kwargs": None}),
        (400, {"structured_outputs": {"regex": {"1": "x"}}}),
        (400, {"max_completion_tokens": 5, "logprobs": True, "top_logprobs": 21}),
        (400, {"prompt_logprobs": 1}),
        (400, {"stream_options": {"include_usage": None}}),
        (400, {"repetition_detection": {"max_pattern_size": 4}}),
        (400, {"return_prompt_text": True}),
    ],
)
def test_vllm_chat(client: httpx.Client, status: int, body: Any) -> None:
    ask(client, "/v1/chat/completions", status, messages=HI, **body)


@pytest.mark.parametrize("included", [True, False, None])
def test_vllm_include_reasoning(client: httpx.Client, included: bool | None) -> None:
    """test_include_reasoning.py: the model thinks all the same; it is not told."""
    body: Any = {"model": "thinker", "messages": HI, "include_reasoning": included}
    said = ask(client, "/v1/chat/completions", **body)
    message = said["choices"][0]["message"]
    assert ("reasoning_content" in message) == (included is not False)
    assert message["content"] == "Well."
    assert said["usage"]["completion_tokens"] > len("hm\n</think>\n\nWell.")  # and an end
    deltas = [
        each["choices"][0]["delta"] for each in events(client, "/v1/chat/completions", **body)
    ]
    assert any("reasoning_content" in delta for delta in deltas) == (included is not False)
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."


@pytest.mark.parametrize("included", [True, False, None])
def test_vllm_include_reasoning_of_responses(client: httpx.Client, included: bool | None) -> None:
    body: Any = {"model": "thinker", "input": "hi", "include_reasoning": included}
    kinds = [item["type"] for item in ask(client, "/v1/responses", **body)["output"]]
    assert kinds == ([] if included is False else ["reasoning"]) + ["message"]
    told = {each["type"] for each in events(client, "/v1/responses", **body)}
    assert ("response.reasoning_text.delta" in told) == (included is not False)


def test_vllm_sampling_of_responses(client: httpx.Client) -> None:
    """responses/test_sampling_params.py: what chat takes beside OpenAI's fields."""
    said = ask(
        client, "/v1/responses", input="hi", max_output_tokens=50, top_k=50, seed=42,
        repetition_penalty=1.2, stop=[" hi"], ignore_eos=True, skip_special_tokens=True,
        user="u", service_tier="auto", request_id="r", prompt_cache_key="k",
    )  # fmt: skip
    assert said["output"][0]["content"][0]["text"] == "user:"  # the echo, to the stop
    said = ask(
        client, "/v1/responses", input="hi", max_output_tokens=2,
        structured_outputs={"regex": "[0-9]{2}"},
    )  # fmt: skip
    assert said["status"] == "incomplete"


@pytest.mark.parametrize(
    "field",
    [
        {"top_k": -2},
        {"seed": 2**63},
        {"stop": [""]},
        {"repetition_penalty": 0},
        {"vllm_xargs": {"custom": "value"}},
        {"bad_words": ["x"]},
        {"cache_salt": "x"},
        {"previous_input_messages": [{"role": "user"}]},
        {"enable_response_messages": True},
        {"prompt": {"id": "pmpt_1"}},
        {"context_management": [{"type": "compaction"}]},
        {"structured_outputs": {"choice": ["a"]}, "guided_regex": "b"},
    ],
    ids="-".join,
)
def test_fields_of_responses_that_are_not_kept(client: httpx.Client, field: Any) -> None:
    error = ask(client, "/v1/responses", 400, input="hi", **field)["error"]
    assert any((error["param"] or "").startswith(name) for name in field), error
