"""Using the page: by keyboard, by ear, on a phone, and through refusals; nothing typed is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from penstock.testing.fake_server import add_model, serving
from penstock.testing.fake_worker import FakeModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from playwright.sync_api import Page

    from penstock.testing.browser import Tab

ANSWER = "First it rains. Then a river runs.\nAt last it turns a wheel."
FIELD = ["p", {}, ["input", {}]]
MORPH = """async ([before, after]) => {
  const { h, morph } = await import(location.origin + "/web/js/dom.js");
  const made = (node) =>
    typeof node === "string" ? node : h(node[0], node[1], node.slice(2).map(made));
  const old = made(["div", {}, ...before]);
  const kept = old.querySelector("input");
  document.body.append(old);
  kept.focus();
  morph(old, made(["div", {}, ...after]));
  const same = old.querySelector("input") === kept && document.activeElement === kept;
  const equal = old.isEqualNode(made(["div", {}, ...after]));
  old.remove();
  return { same, equal };
}"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose model answers in sentences, slowly enough to be seen at it."""
    home: Path = tmp_path_factory.mktemp("using")
    add_model(home, "slow", FakeModel(answer=ANSWER, step_s=0.02, context=512))
    with serving(home) as server:
        yield server.url


def chat(tab: Tab) -> Page:
    page = tab.show("chat")
    page.locator("[data-action=hint]").first.wait_for()  # the model is known
    return page


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_label("Message", exact=True).press("Enter")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([["div", {"class": "a"}], FIELD], [FIELD]),
        ([FIELD], [["div", {"class": "a"}], FIELD]),
        ([["p", {"class": "a"}], FIELD, "1"], [FIELD, "2"]),
        ([["p", {}, "1"], ["p", {"data-key": "k"}, FIELD]], [["p", {"data-key": "k"}, FIELD]]),
        ([["div", {"class": "on x"}, FIELD], "1"], [["div", {"class": "on y"}, FIELD], ["i", {}]]),
    ],
)
def test_what_comes_or_goes_beside_a_field_leaves_it_alone(
    open_url: str, open_tab: Callable[..., Tab], before: list[Any], after: list[Any]
) -> None:
    page = open_tab(open_url).show("chat")
    seen: dict[str, Any] = page.evaluate(MORPH, [before, after])
    assert seen == {"same": True, "equal": True}


def test_a_draft_stays_while_the_options_come_and_go(
    open_url: str, open_tab: Callable[..., Tab]
) -> None:
    page = open_tab(open_url).show("chat")
    prompt = page.get_by_label("Message", exact=True)
    prompt.fill("half a question")
    for shown in (1, 0):
        page.get_by_label("System prompt and sampling").click()
        page.wait_for_function(
            "(shown) => document.querySelectorAll('.options').length === shown", arg=shown
        )
        assert prompt.input_value() == "half a question"


def test_an_answer_can_be_heard_sentence_by_sentence(
    url: str, open_tab: Callable[..., Tab]
) -> None:
    page = chat(open_tab(url))
    spoken = page.locator('[role="log"][aria-live="polite"] p')
    ask(page, "What is a penstock?")
    page.locator('.answer[aria-busy="true"]').wait_for()
    spoken.filter(has_text="First it rains.").first.wait_for()
    assert page.locator('.answer[aria-busy="true"]').count() == 1  # while it goes on
    page.get_by_label("Stop").click()
    page.locator("[data-figures]").wait_for()
    sentences = spoken.all_inner_texts()
    assert sentences[0] == "First it rains."
    assert ANSWER.replace("\n", " ").startswith(" ".join(sentences[:-1]))
    assert sentences[-1] == "Stopped."


def test_after_a_refused_question_others_are_answered(
    url: str, open_tab: Callable[..., Tab]
) -> None:
    page = chat(open_tab(url, expected=("400",)))
    page.get_by_label("System prompt and sampling").click()
    page.get_by_label("Max tokens").fill("8")
    ask(page, "word " * 400)
    page.locator(".answer .problem").wait_for()
    ask(page, "short")
    page.locator("[data-figures]").wait_for()
    assert page.locator(".answer .problem").count() == 1


def test_the_system_prompt_and_sampling_are_sent(url: str, open_tab: Callable[..., Tab]) -> None:
    page = chat(open_tab(url))
    page.get_by_label("System prompt and sampling").click()
    wanted = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3}
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    for name, number in wanted.items():
        label = name.replace("_", " ").capitalize()
        page.get_by_label(label, exact=True).fill(str(number))
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "Why?")
    body = asked.value.post_data_json
    assert body is not None
    assert body.items() >= wanted.items()
    assert [(one["role"], one["content"]) for one in body["messages"]] == [
        ("system", "Be brief."),
        ("user", "Why?"),
    ]
    page.get_by_text("cut off by the token limit").wait_for()
    page.get_by_label("Temperature", exact=True).fill("")  # the model's own again
    with page.expect_request("**/v1/chat/completions") as asked:
        ask(page, "And then?")
    again = asked.value.post_data_json
    assert again is not None and "temperature" not in again
    page.locator("[data-figures]").nth(1).wait_for()


def test_the_keyboard_alone(open_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(open_url).show("memory")
    page.locator(".books").first.wait_for()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    assert page.locator(".page.memory").count() == 1  # it is not another page
    for key, name in enumerate(
        ("chat", "memory", "models", "requests", "cache", "bench", "events", "settings"), start=1
    ):
        page.keyboard.press(str(key))
        page.locator(f".page.{name}").wait_for()
        page.wait_for_function("() => document.activeElement.id === 'main'")
        assert page.locator("main").get_attribute("aria-label") == name.capitalize()
        # Every control can be reached, and shows that it is.
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement.id") == "prompt", name
        page.evaluate("document.activeElement.blur()")


def test_the_list_of_conversations_on_a_phone(open_url: str, open_tab: Callable[..., Tab]) -> None:
    page = open_tab(open_url, width=390).show("chat")
    button = page.get_by_label("Conversations", exact=True).and_(page.locator("button"))
    ways: list[Callable[[], None]] = [
        lambda: page.keyboard.press("Escape"),
        lambda: page.get_by_label("Close the list").click(),
        lambda: page.mouse.click(380, 400),
    ]
    for close in ways:
        button.click()
        page.locator(".talks").wait_for()
        page.wait_for_function("() => document.activeElement.closest('.talks') !== null")
        close()
        page.locator(".talks").wait_for(state="hidden")
        page.wait_for_function("() => document.activeElement.matches('.talk-head button')")


def test_a_model_is_unloaded_and_loaded_with_its_details_open(
    open_url: str, open_tab: Callable[..., Tab]
) -> None:
    httpx.post(f"{open_url}/admin/api/models/fake/unload").raise_for_status()
    page = open_tab(open_url).show("models")
    card = page.locator('[data-model="fake"]')
    card.get_by_role("button", name="Load", exact=True).click()
    card.locator('[data-state="ready"]').wait_for()
    card.get_by_role("button", name="Will it fit?").click()
    for action, state in (("Unload", "absent"), ("Load", "ready")):
        card.locator(".verdict").wait_for()
        card.get_by_role("button", name=action, exact=True).click()
        card.locator(f'[data-state="{state}"]').wait_for()
        card.locator(".verdict").wait_for()
