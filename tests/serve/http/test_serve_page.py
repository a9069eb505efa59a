"""The page at `/`: from one file, held to its own policy, and used in a real browser by keyboard."""

import json
import re
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from headless import BINARY, Chromium
from page_server import PageServer
from typed import stand_in

from specdec_cli.serve.page import read_page
from specdec_cli.serve.page.reference import reference_page

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


def test_asks_for_nothing_from_elsewhere() -> None:
    assert "http" not in HTML.replace("http://www.w3.org/2000/svg", "")
    assert [attributes for tag, attributes in ELEMENTS if "src" in attributes or tag == "base"] == []
    assert [attributes["href"] for _, attributes in ELEMENTS if "href" in attributes] == ["data:,", "docs"]
    assert "@import" not in HTML
    assert "url(" not in HTML


def test_what_a_model_says_cannot_become_markup() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", HTML)


def test_runs_under_a_policy_without_inline_exceptions() -> None:
    assert [name for _, attributes in ELEMENTS for name in attributes if name == "style" or name.startswith("on")] == []
    policy = read_page().content_security_policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert "connect-src 'self'" in policy


def test_keeps_nothing_in_the_browser() -> None:
    assert not re.search(r"localStorage|sessionStorage|cookie|indexedDB", HTML)


def test_every_control_has_a_label_and_every_id_is_one() -> None:
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
def test_a_chat_by_keyboard_with_tokens_told_apart_and_charts(browser: Chromium) -> None:
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
def test_a_conversation_that_is_cleared_while_it_streams_is_gone(browser: Chromium) -> None:
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
def test_without_a_chat_template_it_completes_with_the_controls_values(browser: Chromium) -> None:
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


def text(name: str) -> str:
    return f"document.getElementById({json.dumps(name)}).textContent"


def is_shown(browser: Chromium, name: str) -> bool:
    return bool(browser.value(f"!document.getElementById({json.dumps(name)}).hidden"))


def ask(browser: Chromium, prompt: str, ends: str = "Done.") -> None:
    browser.value("document.getElementById('prompt').focus()")
    browser.type(prompt)
    browser.press("Enter")
    browser.wait(f"{text('status')} === {json.dumps(ends)} && !document.getElementById('send').disabled")


def num_turns(browser: Chromium) -> Any:
    return browser.value("document.querySelectorAll('#log .turn').length")


@needs_chromium
def test_the_header_names_model_draft_and_k(browser: Chromium) -> None:
    with PageServer(model={"speculative": {"draft": "small (int8)", "num_speculative_tokens": 5}}) as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy · draft small (int8) · k = 5'")
        browser.open("about:blank")  # polls no server that has ended
    with PageServer(model={"speculative": {"draft": None, "num_speculative_tokens": 0}}) as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy · no draft'")


def settled(count, seconds: float = 1.0) -> int:
    """A count that has not changed for a while."""
    last, since = count(), time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(0.05)
        if count() != last:
            last, since = count(), time.monotonic()
    return last


@needs_chromium
def test_the_page_asks_for_a_key_and_says_when_it_is_wrong(tmp_path: Path) -> None:
    server = PageServer(key="secret")
    with Chromium(tmp_path / "profile") as browser, server as url:
        browser.open(url)
        browser.wait(f"{text('gate-text')} === 'This server asks for an API key.'")
        assert is_shown(browser, "gate")
        assert not is_shown(browser, "trouble")
        assert not is_shown(browser, "metrics-trouble")
        browser.wait("document.activeElement.id === 'key'")
        browser.type("wrong")
        browser.press("Enter")
        browser.wait(f"{text('gate-text')} === 'The server does not accept this API key.'")
        refused = settled(lambda: server.num_refused)  # what was on its way with the wrong key
        ask(browser, "hello", "Failed.")
        assert server.num_refused == refused + 1, "nothing is polled while the page waits for a key"
        assert num_turns(browser) == 0
        assert browser.value("document.getElementById('prompt').value") == "hello"
        assert not is_shown(browser, "trouble"), "one sentence is enough"
        browser.value("document.getElementById('key').value = 'secret'")
        browser.value("document.getElementById('key').focus()")
        browser.press("Enter")
        browser.wait(f"{text('served')} === 'toy'")
        assert not is_shown(browser, "gate")
        browser.wait("document.getElementById('speed-now').textContent !== '–'")
        ask(browser, "", "Done.")
        assert num_turns(browser) == 2
    assert len(server.bodies) == 1


@needs_chromium
def test_a_full_queue_is_one_sentence_and_no_turn(tmp_path: Path) -> None:
    with Chromium(tmp_path / "profile") as browser, PageServer() as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        ask(browser, "refuse me", "Failed.")
        assert browser.value(text("trouble")) == "The server's queue is full: try again in 3\u00a0s."
        assert num_turns(browser) == 0
        assert browser.value("document.getElementById('prompt').value") == "refuse me"
        assert not is_shown(browser, "offer")
        browser.value("document.getElementById('prompt').value = ''")
        ask(browser, "now")
        assert not is_shown(browser, "trouble")


@needs_chromium
def test_a_server_that_went_away_is_one_sentence_and_no_turn(tmp_path: Path) -> None:
    gone = "The server cannot be reached: it has stopped, or the network is gone."
    with Chromium(tmp_path / "profile") as browser:
        with PageServer() as url:
            browser.open(url)
            browser.wait(f"{text('served')} === 'toy'")
            ask(browser, "break off", "Failed.")
            assert browser.value(text("trouble")) == "The answer broke off: the server went away."
            assert num_turns(browser) == 2, "what came stays"
        browser.wait(f"{text('metrics-trouble')} === {json.dumps(gone)}")
        ask(browser, "anybody?", "Failed.")
        assert browser.value(text("trouble")) == gone
        assert num_turns(browser) == 2
        assert browser.value("document.getElementById('prompt').value") == "anybody?"
        browser.wait("document.getElementById('metrics-trouble').hidden")


@needs_chromium
def test_a_wrong_setting_is_said_before_anything_is_sent(browser: Chromium) -> None:
    server = PageServer()
    with server as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        browser.value("document.getElementById('temperature').value = '9'")
        browser.value("document.getElementById('settings').open = false")
        browser.type("hello")
        browser.press("Enter")
        browser.wait(f"{text('trouble')}.startsWith('Temperature: ')")
        assert browser.value("document.getElementById('settings').open")
    assert server.bodies == []


@needs_chromium
def test_49_26_the_oldest_turns_are_dropped_by_themselves_and_a_line_says_so(tmp_path: Path) -> None:
    server = PageServer(model={"max_model_len": 60})
    with Chromium(tmp_path / "profile") as browser, server as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        for prompt in ("one", "two", "three", "four"):
            ask(browser, prompt)
        assert server.bodies[-1].get("max_tokens") is None, "a chat runs to the end of the context"
        assert num_turns(browser) == 8
        assert [m["content"] for m in server.bodies[-1]["messages"] if m["role"] == "user"] == ["three", "four"]
        assert browser.value("document.querySelectorAll('#log .turn.dropped').length") == 4
        line = "The oldest 2 turns are no longer sent, because the conversation fills the model's context."
        assert browser.value("document.querySelector('#log > .facts').textContent") == line
        assert not is_shown(browser, "offer")
        assert browser.value(text("trouble")) == ""


@needs_chromium
@pytest.mark.parametrize("way", ["shorten", "start-over"])
def test_a_conversation_that_fills_the_context_can_be_shortened_or_cleared(tmp_path: Path, way: str) -> None:
    server = PageServer(model={"max_model_len": 60})
    with Chromium(tmp_path / "profile") as browser, server as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        for prompt in ("one", "two"):
            ask(browser, prompt)
        browser.value("offer('The conversation fills the context.')")
        assert is_shown(browser, "offer")
        browser.value("document.getElementById('prompt').focus()")
        browser.type("four")
        browser.value(f"document.getElementById('{way}').click()")
        if way == "shorten":
            browser.wait(f"{status('Done.')} && document.querySelectorAll('#log .turn').length === 6")
            assert [m["content"] for m in server.bodies[-1]["messages"] if m["role"] == "user"] == ["two", "four"]
            assert browser.value("document.querySelectorAll('#log .turn.dropped').length") == 2
        else:
            assert num_turns(browser) == 0
            assert browser.value("document.getElementById('prompt').value") == "four"
        assert not is_shown(browser, "offer")


@needs_chromium
@pytest.mark.parametrize(("width", "height"), [(800, 900), (1280, 800)])
def test_49_26_open_settings_leave_the_conversation_its_height(tmp_path: Path, width: int, height: int) -> None:
    with Chromium(tmp_path / "profile", width, height) as browser, PageServer() as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        log, settings = (f"document.getElementById('{name}').getBoundingClientRect()" for name in ("log", "settings"))
        assert browser.value("document.getElementById('settings').open")
        assert browser.value(f"{log}.height") > 450
        assert browser.value(f"{log}.left >= {settings}.right"), "beside it"
        inside = "[...document.querySelectorAll('#settings input, #settings select')]"
        right = f"{inside}.every((one) => one.getBoundingClientRect().right <= {settings}.right)"
        assert browser.value(right), "nothing is cut off"
        browser.value("document.getElementById('settings').open = false")
        assert browser.value(f"{log}.width") > 400


@needs_chromium
def test_49_26_an_empty_field_says_how_many_tokens_a_mode_takes(browser: Chromium) -> None:
    server = PageServer()
    with server as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        assert browser.value("document.getElementById('max-tokens').placeholder") == "all"
        browser.value("document.getElementById('mode-completion').click()")
        assert browser.value("document.getElementById('max-tokens').placeholder") == "128"
        ask(browser, "Once")
    assert server.bodies[-1]["max_tokens"] == 128


@needs_chromium
@pytest.mark.parametrize(("width", "height"), [(390, 844), (800, 900), (1280, 800)])
def test_the_composer_is_in_sight_and_settings_fold_on_narrow_screens(tmp_path: Path, width: int, height: int) -> None:
    with Chromium(tmp_path / "profile", width, height) as browser, PageServer() as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        for _ in range(6):
            ask(browser, "again")
        assert browser.value("document.getElementById('settings').open") == (width >= 768)
        bottom = browser.value("document.getElementById('form').getBoundingClientRect().bottom")
        assert height - 120 < bottom <= height
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out to the side"


@needs_chromium
def test_charts_show_short_peaks(browser: Chromium) -> None:
    """A burst between two polls is drawn at its own height, and what came and went is seen to have run."""
    with PageServer() as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        found = browser.value(
            """(() => {
              const base = { drafts: 0, drafted: 0, accepted: 0, acceptedAt: [], draftedAt: [], running: 0, waiting: 0,
                cache: 0, firstSum: 0, firstCount: 0, refused: 0 };
              past = [];
              [[0, 0, 0], [1, 0, 0], [2, 400, 1], [3, 400, 1], [4, 400, 1]].forEach(([time, tokens, ended], i) =>
                record({ ...base, time: time + 1e6, tokens, ended, cache: i === 2 ? .03 : 0 }));
              draw();
              return [past.map((one) => one.speed), past[2].running, document.querySelector('#speed text').textContent,
                document.querySelector('#cache text').textContent, document.querySelectorAll('#speed circle').length];
            })()"""
        )
    assert found == [[None, 0, 400, 0, 0], 1, "500", "5 %", 1]


CONTRASTS = """(() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((one, i) => one * a + below[i] * (1 - a));
  const light = (colour) => {
    const [r, g, b] = colour.map((one) => (one /= 255) <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4);
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const paper = (element) => {
    const below = element.parentElement ? paper(element.parentElement) : [255, 255, 255];
    return over(parse(getComputedStyle(element).backgroundColor), below);
  };
  const faded = (element) => element ? getComputedStyle(element).opacity * faded(element.parentElement) : 1;
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element);
    if (!node.data.trim() || !element.checkVisibility()) continue;
    if (element.closest("script, style, option, :disabled")) continue;
    const below = paper(element), colour = element instanceof SVGElement ? style.fill : style.color;
    const [one, other] = [over([...parse(colour).slice(0, 3), faded(element)], below), below].map(light);
    const ratio = (Math.max(one, other) + .05) / (Math.min(one, other) + .05);
    if (ratio < 4.5) poor.push(`${node.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
})()"""


def unlock(browser: Chromium) -> None:
    browser.wait(f"{text('gate-text')} === 'This server asks for an API key.'")
    browser.type("wrong")
    browser.press("Enter")
    browser.wait(f"{text('gate-text')} === 'The server does not accept this API key.'")


def talk(browser: Chromium) -> None:
    ask(browser, "one")
    browser.wait("document.getElementById('speed-now').textContent !== '–'")


def refused(browser: Chromium) -> None:
    ask(browser, "refuse me", "Failed.")


def shortened(browser: Chromium) -> None:
    for prompt in ("one", "two", "three", "four"):
        ask(browser, prompt)
    browser.value("offer('The conversation fills the context.')")
    assert browser.value(CONTRASTS) == []
    browser.wait(f"{status('Done.')} && document.querySelectorAll('#log .turn.dropped').length === 4")


STATES = {
    "a conversation": (talk, {}),
    "a wrong key": (unlock, {"key": "secret"}),
    "a full queue": (refused, {}),
    "dropped turns": (shortened, {"model": {"max_model_len": 60}}),
    "long names": (talk, {"model": {"id": "/home/user/models/" + "a-long-name-" * 6}}),
}
ANSWERS = (
    ((("https://example.org/" + "a-word-without-spaces/" * 12, True), (" ends", False)),),
    ((("投机解码用一个小模型起草" * 8, True), (" 👩‍👩‍👧‍👦🎉" * 20, False)),),
    ((("def f(x):\n    return x" + " + x" * 60, True), ("\n", False)),),
)


@needs_chromium
@pytest.mark.parametrize("state", STATES)
def test_every_state_is_readable_at_every_width(tmp_path: Path, state: str) -> None:
    """Contrast of WCAG AA, light and dark; nothing sticks out to the side; the composer is in sight."""
    drive, given = STATES[state]
    with Chromium(tmp_path / "profile") as browser, PageServer(answers=ANSWERS, **stand_in(given)) as url:
        browser.open(url)
        if "key" not in stand_in(given):
            browser.wait(f"!{text('served')}.startsWith('asking')")
        drive(browser)
        for width, height in ((320, 640), (390, 844), (800, 900), (1280, 800)):
            browser.resize(width, height)
            assert browser.value("document.documentElement.scrollWidth <= innerWidth"), f"{state} at {width}"
            parts = "[...document.querySelectorAll('#log, #play, #live, header')]"
            assert browser.value(f"{parts}.every((e) => e.scrollWidth <= e.clientWidth)"), f"{state} at {width}"
            browser.wait(f"document.getElementById('settings').open === {str(width >= 768).lower()}")
            if height > 800:
                bottom = "document.getElementById('form').getBoundingClientRect().bottom"
                browser.wait(f"{height - 120} < {bottom} && {bottom} <= {height}")
            for dark in (False, True):
                browser.colour(dark)
                assert browser.value(CONTRASTS) == [], f"{state} at {width}, {'dark' if dark else 'light'}"


@needs_chromium
def test_the_end_of_the_conversation_stays_in_sight(browser: Chromium) -> None:
    """When the settings open, and when the window grows and shrinks; not after the reader has scrolled up."""
    log = "document.getElementById('log')"
    gap = f"({log}.scrollHeight - {log}.scrollTop - {log}.clientHeight)"
    with PageServer(answers=ANSWERS) as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        for _ in range(8):
            ask(browser, "again")
        browser.wait(f"{gap} < 2")
        for width, height in ((390, 700), (390, 1400), (1280, 600)):
            browser.resize(width, height)
            browser.wait(f"{gap} < 2")
        browser.value("document.getElementById('settings').open = false")
        browser.wait(f"{gap} < 2")
        browser.value("document.getElementById('log').scrollTop = 0")
        browser.wait(f"{gap} > 200")
        browser.resize(390, 700)
        browser.wait("!document.getElementById('settings').open")
        assert browser.value(gap) > 200


@needs_chromium
def test_the_focus_is_visible_on_every_control(browser: Chromium) -> None:
    """Every control that the keyboard reaches has an outline of at least 2 pixels around it."""
    with PageServer() as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        seen = set()
        for _ in range(20):
            browser.press("Tab")
            name, width = browser.value(
                "(() => { const e = document.activeElement; return [e.id || e.tagName, "
                "e === document.body ? 9 : parseFloat(getComputedStyle(e).outlineWidth)]; })()"
            )
            seen.add(name)
            assert width >= 2, name
    assert {"send", "clear", "temperature", "model", "prompt", "log", "SUMMARY", "A"} <= seen


@needs_chromium
@pytest.mark.parametrize("mode", ["chat", "completion"])
def test_a_message_that_alone_is_too_long_is_one_sentence(tmp_path: Path, mode: str) -> None:
    what = "message" if mode == "chat" else "text"
    with Chromium(tmp_path / "profile") as browser, PageServer(model={"max_model_len": 5}) as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy'")
        browser.value(f"document.getElementById('mode-{mode}').click()")
        ask(browser, "too long", "Failed.")
        assert browser.value(text("trouble")) == (
            f"This {what} and the answer do not fit into the model's context of 5 tokens."
        )
        assert not is_shown(browser, "offer")
        assert num_turns(browser) == 0
        assert browser.value("document.getElementById('prompt').value") == "too long"


@needs_chromium
def test_a_server_that_loads_says_so_and_recovers(tmp_path: Path) -> None:
    server = PageServer()
    server.is_loading = True
    with Chromium(tmp_path / "profile") as browser, server as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'The server takes no requests now: the model is loading.'")
        ask(browser, "hello", "Failed.")
        assert browser.value(text("trouble")) == "The server takes no requests now: the model is loading."
        assert num_turns(browser) == 0
        server.is_loading = False
        browser.wait(f"{text('served')} === 'toy'")
        ask(browser, "")
        assert num_turns(browser) == 2
        assert not is_shown(browser, "trouble")


@needs_chromium
def test_one_point_and_a_peak_of_waiting_requests_are_drawn(browser: Chromium) -> None:
    with PageServer() as url:
        browser.open(url)
        browser.wait("document.querySelectorAll('#cache circle').length === 1")
        found = browser.value(
            """(() => {
              const base = { ...past.at(-1), speed: 1, rate: .5 };
              past = [0, 1, 2, 3].map((i) => ({ ...base, time: base.time - 3 + i, waiting: i === 1 ? 9 : 0 }));
              draw();
              return [...document.querySelectorAll('#requests circle')].map((one) => one.getAttribute('class'));
            })()"""
        )
    assert found == ["dot of-two"]


@needs_chromium
def test_the_page_sends_and_shows_trees(browser: Chromium) -> None:
    server = PageServer(
        num_nodes=7, model={"speculative": {"draft": "d", "num_speculative_tokens": 3, "tree": "2,1,1"}}
    )
    with server as url:
        browser.open(url)
        browser.wait(f"{text('served')} === 'toy · draft d · k = 3 · tree 2,1,1'")
        for tree in (" dynamic:8 ", "none", ""):
            browser.value(f"document.getElementById('tree').value = '{tree}'")
            ask(browser, "Once")
        facts = "document.querySelector('#log .facts').textContent"
        assert "3 of 9 drafted tokens accepted (33 %) · 21 drafted nodes" in str(browser.value(facts))
        browser.wait(f"{text('total-nodes')} === '7.0'")
        assert browser.value(text("total-ranks")) == "100, 0\u00a0%"
        assert is_shown(browser, "nodes")
        assert is_shown(browser, "ranks")
        browser.open("about:blank")
    sent = [body["speculative"] for body in server.bodies]
    assert sent == [{"details": True, "tree": "dynamic:8"}, {"details": True, "tree": None}, {"details": True}]


@needs_chromium
def test_the_page_shows_no_trees_where_chains_are_drafted(browser: Chromium) -> None:
    with PageServer() as url:
        browser.open(url)
        ask(browser, "Once")
        browser.wait(f"{text('total-length')} !== '–'")
        assert not is_shown(browser, "nodes")
        assert "nodes" not in str(browser.value("document.querySelector('#log .facts').textContent"))
        browser.open("about:blank")


def test_49_26_the_reference_shows_code_and_no_backticks() -> None:
    schema = {"description": "A `model` & more.", "properties": {"n": {"type": "integer", "description": "As `n`"}}}
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Body"}}}
    route = {
        "description": "Answers `prompt`; see `<b>`.",
        "requestBody": {"content": content},
        "responses": {"400": {"description": "`n` is wrong"}},
    }
    page = reference_page(
        {
            "info": {"title": "specdec", "version": "1"},
            "paths": {"/v1": {"post": route}},
            "components": {"schemas": {"Body": schema}},
        }
    ).body.decode()
    assert "`" not in page
    for code in ("prompt", "&lt;b&gt;", "model", "n"):
        assert f"<code>{code}</code>" in page
