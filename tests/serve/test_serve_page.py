"""The page at `/`: from one file, held to its own policy, and used in a real browser by keyboard."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from headless import BINARY, Chromium
from page_server import PageServer

from specdec_cli.serve.page import read_page

HTML = read_page().body.decode()
needs_chromium = pytest.mark.skipif(BINARY is None, reason="no Chromium on this machine")


class Elements(HTMLParser):
    """Every tag with its attributes, in the document's order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(HTML)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attributes}))


ELEMENTS = Elements().found


def test_asks_for_nothing_from_elsewhere():
    assert "http" not in HTML.replace("http://www.w3.org/2000/svg", "")
    assert [attributes for tag, attributes in ELEMENTS if "src" in attributes or tag == "base"] == []
    assert [attributes["href"] for _, attributes in ELEMENTS if "href" in attributes] == ["data:,"]
    assert "@import" not in HTML
    assert "url(" not in HTML


def test_what_a_model_says_cannot_become_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", HTML)


def test_runs_under_a_policy_without_inline_exceptions():
    assert [name for _, attributes in ELEMENTS for name in attributes if name == "style" or name.startswith("on")] == []
    policy = read_page().content_security_policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert "connect-src 'self'" in policy


def test_keeps_nothing_in_the_browser():
    assert not re.search(r"localStorage|sessionStorage|cookie|indexedDB", HTML)


def test_every_control_has_a_label_and_every_id_is_one():
    ids = [attributes["id"] for _, attributes in ELEMENTS if "id" in attributes]
    labelled = {attributes["for"] for tag, attributes in ELEMENTS if tag == "label"}
    controls = {attributes["id"] for tag, attributes in ELEMENTS if tag in ("input", "textarea", "select")}
    assert len(ids) == len(set(ids))
    assert controls == labelled
    assert set(re.findall(r'\$\("([\w-]+)"\)', HTML)) <= set(ids)
    for name in ("aria-labelledby", "aria-describedby"):
        assert {attributes[name] for _, attributes in ELEMENTS if name in attributes} <= set(ids)
    assert [attributes for tag, attributes in ELEMENTS if tag == "svg" and "aria-label" not in attributes] == []


def status(text: str) -> str:
    return f"document.getElementById('status').textContent === {json.dumps(text)}"


def pieces(browser: Chromium) -> list[list[str]]:
    """Kind and text of the pieces of the last turn."""
    last = "[...document.querySelectorAll('#log .text')].at(-1)"
    return browser.value(f"[...{last}.children].map((span) => [span.className, span.textContent])")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    with Chromium(tmp_path / "profile") as chromium:
        yield chromium
        assert chromium.console == []


@needs_chromium
def test_a_chat_by_keyboard_with_tokens_told_apart_and_charts(browser: Chromium):
    server = PageServer(prefix="vllm")
    with server as url:
        browser.open(url)
        browser.wait("document.getElementById('served').textContent === 'toy'")
        browser.type("Tell me a story")
        browser.press("Enter")
        browser.wait(status("Done."))
        assert pieces(browser) == [
            ["accepted", "Once upon"],
            ["own", " a"],
            ["accepted", " time"],
            ["own", " <b>there was."],
        ]
        facts = browser.value("document.querySelector('#log .facts').textContent")
        assert "6 tokens" in facts
        assert "3 of 9 drafted tokens accepted (33 %)" in facts
        browser.type("and on, forever")
        browser.press("Enter")
        browser.wait(
            "document.querySelectorAll('#log .text').length === 4 && !document.getElementById('stop').disabled"
        )
        browser.wait("document.getElementById('rate-now').textContent === '33 %'")
        browser.press("Escape")
        browser.wait(status("Stopped."))
        browser.wait("document.querySelectorAll('#position rect').length === 3")
        browser.wait("document.getElementById('requests-now').textContent === '2 · 1'")
        browser.wait("document.getElementById('cache-now').textContent === '40 %'")
    first, second = server.bodies
    assert first["speculative"] == {"details": True}, "a server without a draft would refuse `enabled: true`"
    assert first["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "Once upon a time <b>there was."
    assert server.num_disconnected == 1


@needs_chromium
def test_a_conversation_that_is_cleared_while_it_streams_is_gone(browser: Chromium):
    server = PageServer()
    with server as url:
        browser.open(url)
        browser.wait("document.getElementById('served').textContent === 'toy'")
        browser.type("and on, forever")
        browser.press("Enter")
        browser.wait("document.querySelectorAll('#log .text').length === 2")
        browser.wait("document.querySelectorAll('#log .text')[1].textContent !== ''")
        browser.value("document.getElementById('clear').click()")
        browser.wait(status("Stopped."))
        browser.type("Once")
        browser.press("Enter")
        browser.wait(status("Done."))
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["Once"]


@needs_chromium
def test_without_a_chat_template_it_completes_with_the_controls_values(browser: Chromium):
    server = PageServer(template=None)
    with server as url:
        browser.open(url)
        browser.wait("document.getElementById('mode-chat').disabled")
        assert browser.value("document.getElementById('prompt-label').textContent") == "Text to continue"
        for field, value in {
            "temperature": "0.7",
            "top-p": "0.9",
            "max-tokens": "5",
            "seed": "3",
            "depth": "2",
        }.items():
            browser.value(f"document.getElementById('{field}').value = '{value}'")
        browser.type("Once")
        browser.press("Enter")
        browser.wait(status("Done."))
    (body,) = server.bodies
    assert (body["prompt"], body["temperature"], body["top_p"]) == ("Once", 0.7, 0.9)
    assert (body["max_tokens"], body["seed"]) == (5, 3)
    assert body["speculative"] == {"details": True, "num_speculative_tokens": 2}


@needs_chromium
def test_errors_are_said_in_words(tmp_path: Path):
    server = PageServer(key="secret")
    with Chromium(tmp_path / "profile") as browser, server as url:
        browser.open(url)
        browser.wait("document.getElementById('served').textContent.includes('wants an API key: no valid API key')")
        browser.value("document.getElementById('key').value = 'secret'")
        browser.wait("document.getElementById('served').textContent === 'toy'")
        browser.wait("document.getElementById('metrics-trouble').hidden")
        browser.type("refuse me")
        browser.press("Enter")
        browser.wait(status("Failed."))
        trouble = browser.value("document.getElementById('trouble').textContent")
        assert trouble == "The server is busy, try again in 3 s: the queue is full"
        assert browser.value("document.getElementById('prompt').value") == "refuse me"
        browser.value("document.getElementById('temperature').value = '9'")
        browser.press("Enter")
        browser.wait("document.getElementById('trouble').textContent.startsWith('Temperature: ')")
    assert len(server.bodies) == 1
