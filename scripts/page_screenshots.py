#!/usr/bin/env python
"""Take pictures of the server's page in every state, at three widths, light and dark.

    python scripts/page_screenshots.py /tmp/shots

The page is the real one; the server behind it is the one of the page's tests, with made-up answers. Needs Chromium.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from headless import BINARY, Chromium
from page_server import PageServer, Steps

SIZES = ((390, 844), (800, 1000), (1280, 800))
_MODEL = {"id": "builtin:target", "speculative": {"draft": "builtin:draft (int8)", "num_speculative_tokens": 4}}
_LONG = {
    "id": "/home/user/models/Meta-Llama-3.1-70B-Instruct",
    "speculative": {"draft": "/home/user/models/Llama-3.2-1B-Instruct (int8)", "num_speculative_tokens": 5},
}
_ANSWERS = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine.",
    "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a  # a line of code "
    "that is much longer than the screen of a telephone is wide, so that it has to wrap somewhere\n",
    "投机解码用一个小模型起草，再由大模型一次验证多个词元。接受的词元与大模型自己生成的完全一致，因此输出的分布不变，只是更快。",
    "👩‍👩‍👧‍👦 family, 🇨🇭 flag, 👍🏽 thumb, ✨ sparkles 🎉🎉🎉",
    "https://example.org/a/very/long/address/that/has/no/space/in/it?" + "with=a_query&" * 12,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 3,
)


def steps_of(text: str) -> Steps:
    """A text as steps of three tokens, of which the first two were drafted."""
    words = re.findall(r"\s*\S{1,12}|\s+$", text)
    cut = [words[i : i + 3] for i in range(0, len(words), 3)]
    return tuple(tuple((word, place < 2 and len(step) > 1) for place, word in enumerate(step)) for step in cut)


def _text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


def _ask(browser: Chromium, prompt: str, ends: str = "Done.") -> None:
    browser.value("document.getElementById('prompt').focus()")
    browser.type(prompt)
    browser.press("Enter")
    browser.wait(f"{_text('status')} === '{ends}' && !document.getElementById('send').disabled")


def _empty(browser: Chromium, stop: Callable[[], None]) -> None:
    browser.wait(f"{_text('speed-now')} !== '–'")


def _streaming(browser: Chromium, stop: Callable[[], None]) -> None:
    _ask(browser, "Tell me a story about a girl who finds a robot.")
    browser.type("Go on, forever.")
    browser.press("Enter")
    browser.wait("document.querySelectorAll('#log .text').length === 4")
    browser.wait(f"parseFloat({_text('speed-now')}) > 0")


def _locked(browser: Chromium, stop: Callable[[], None]) -> None:
    browser.wait("!document.getElementById('gate').hidden")


def _wrong_key(browser: Chromium, stop: Callable[[], None]) -> None:
    _locked(browser, stop)
    browser.type("wrong")
    browser.press("Enter")
    browser.wait(f"{_text('gate-text')}.includes('does not accept')")


def _full_queue(browser: Chromium, stop: Callable[[], None]) -> None:
    _ask(browser, "Hello")
    _ask(browser, "refuse me", "Failed.")


def _server_gone(browser: Chromium, stop: Callable[[], None]) -> None:
    _ask(browser, "Hello")
    stop()
    _ask(browser, "Is anybody there?", "Failed.")
    browser.wait("!document.getElementById('metrics-trouble').hidden || !document.getElementById('trouble').hidden")


def _broken_off(browser: Chromium, stop: Callable[[], None]) -> None:
    _ask(browser, "break off", "Failed.")


def _too_long(browser: Chromium, stop: Callable[[], None]) -> None:
    for prompt in ("one", "two", "three"):
        _ask(browser, prompt)
    browser.value("offer('The conversation fills the context.')")


def _shortened(browser: Chromium, stop: Callable[[], None]) -> None:
    _too_long(browser, stop)
    _ask(browser, "four")
    browser.wait(f"{_text('status')} === 'Done.' && document.querySelectorAll('#log .turn').length === 8")


def _full(browser: Chromium, stop: Callable[[], None]) -> None:
    prompts = (
        "Tell me a story.",
        "Write a function:\n```python\ndef fib(n): ...\n```",
        "什么是投机解码？",
        "Emoji, please 🙏",
        "An address without spaces",
        "A" * 120,
        "And once more, please.",
    )
    for prompt in prompts:
        _ask(browser, prompt)
    browser.value(
        """(() => {
          const last = past.at(-1), wave = (i) => 40 + 30 * Math.sin(i / 7);
          past = Array.from({ length: 120 }, (_, i) => ({
            ...last, time: last.time - 119 + i, speed: i === 60 ? 310 : wave(i), rate: .55 + .2 * Math.sin(i / 11),
            running: i % 40 < 20 ? 3 : 1, waiting: i === 80 ? 9 : 0, cache: .02 + i / 4000,
          }));
          draw();
        })()"""
    )


def _full_top(browser: Chromium, stop: Callable[[], None]) -> None:
    _full(browser, stop)
    browser.value("document.getElementById('log').scrollTop = 0")


_STATES: dict[str, tuple[Callable[[Chromium, Callable[[], None]], None], dict[str, Any]]] = {
    "empty": (_empty, {}),
    "streaming": (_streaming, {}),
    "locked": (_locked, {"key": "secret"}),
    "wrong-key": (_wrong_key, {"key": "secret"}),
    "full-queue": (_full_queue, {}),
    "server-gone": (_server_gone, {}),
    "broken-off": (_broken_off, {}),
    "too-long": (_too_long, {"model": _MODEL | {"max_model_len": 60}}),
    "shortened": (_shortened, {"model": _MODEL | {"max_model_len": 60}}),
    "full": (_full, {}),
    "full-top": (_full_top, {}),
    "long-names": (_empty, {"model": _LONG}),
}


def take(browser: Chromium, name: str, width: int, height: int, folder: Path) -> None:
    """Bring the page into a state and save it light and dark."""
    drive, server = _STATES[name]
    browser.resize(width, height)
    with ExitStack() as stack:
        given = {"prefix": "vllm", "model": _MODEL, "answers": [steps_of(one) for one in _ANSWERS]} | server
        url = stack.enter_context(PageServer(**given))
        browser.open(url)
        drive(browser, stack.close)
        for scheme in ("light", "dark"):
            browser.colour(scheme == "dark")
            browser.screenshot(folder / f"{name}-{width}-{scheme}.png")
        browser.open("about:blank")  # ends a stream, for which the server would wait


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the pictures; 1 without a browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("states", nargs="*", metavar="STATE", help=f"all without one: {', '.join(_STATES)}")
    parsed = parser.parse_args(arguments)
    if BINARY is None:
        sys.stderr.write("no Chromium on this machine\n")
        return 1
    parsed.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile, Chromium(Path(profile)) as browser:
        for name in parsed.states or _STATES:
            for width, height in SIZES:
                take(browser, name, width, height, parsed.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
