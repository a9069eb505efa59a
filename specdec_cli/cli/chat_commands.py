"""The commands of a conversation: `/k 6`, `/draft ngram`, `/save FILE`, and the others that `/help` lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.cli.output import check_destination, write_file
from specdec_cli.errors import UsageError, did_you_mean
from specdec_cli.files import given_path
from specdec_cli.measure.chat.chat import ChatHistory, Speaker
from specdec_cli.quantities import counted
from specdec_cli.report.chat import chat_markdown, history_lines, settings_words
from specdec_cli.report.view import Screen

_MARKDOWN, _JSON = (".md", ".markdown"), (".json",)
_HELP = (
    ("/k N", "draft N tokens per step; 0 decodes without a draft"),
    ("/draft NAME", "use another draft: ngram, none, or own (the first draft of the conversation)"),
    ("/system TEXT", "set the system message; without TEXT, remove it"),
    ("/history", "list the messages so far"),
    ("/clear", "forget the messages; the system message stays"),
    ("/save FILE", "write the conversation as JSON or Markdown, by the name's ending; --force overwrites"),
    ("/help", "list the commands"),
    ("/quit", "end, as Ctrl-D does"),
)
_KEYS = (
    'A line that ends in a backslash continues on the next one; """ begins and ends a block of lines.',
    "Ctrl-C stops an answer; the text so far stays in the conversation.",
)


@dataclass(slots=True)
class ChatCommands:
    """Runs the commands of one conversation.

    Args:
        history: the conversation.
        speaker: answers it.
        screen: where the commands' words go.
        document: makes the conversation's JSON document.
        saved: files that this conversation wrote, which it may overwrite.
    """

    history: ChatHistory
    speaker: Speaker
    screen: Screen
    document: Callable[[], dict[str, Any]]
    saved: set[Path] = field(default_factory=set)

    def run(self, line: str) -> bool:
        """Run one command; gives whether the conversation goes on.

        Raises:
            UsageError: an unknown command, or a value that it does not take.
        """
        word, _, value = line.partition(" ")
        name = word.removeprefix("/").lower()
        if name in ("quit", "exit"):
            return False
        known: dict[str, Callable[[str], None]] = {
            "k": self._k,
            "draft": self._draft,
            "system": self._system,
            "history": self._history,
            "clear": self._clear,
            "save": self._save,
            "help": self._help,
        }
        if name not in known:
            close = did_you_mean(name, [*known, "quit"]).replace("`", "`/", 1)
            hint = '/help lists the commands; for a message that begins with a slash, type it between """ and """'
            raise UsageError(f"there is no command `{word}`{close}", hint)
        known[name](value.strip())
        return True

    def _k(self, value: str) -> None:
        if value:
            try:
                k = int(value)
            except ValueError:
                raise UsageError(f"`/k {value}` is not a whole number", "for example `/k 6`") from None
            self.speaker.set_k(k)
        self._say_settings()

    def _draft(self, value: str) -> None:
        if value:
            self.speaker.set_draft(value)
        self._say_settings()

    def _say_settings(self) -> None:
        self.screen.say(settings_words(self.speaker.draft, self.speaker.k))

    def _system(self, value: str) -> None:
        self.history.system = value or None
        self.screen.say("system message set" if value else "no system message")

    def _history(self, value: str) -> None:
        self._take_nothing("history", value)
        for line in history_lines(self.history.turns) or ["no messages yet"]:
            self.screen.say(line)

    def _clear(self, value: str) -> None:
        self._take_nothing("clear", value)
        self.history.clear()
        self.screen.say("conversation cleared")

    def _help(self, value: str) -> None:
        self._take_nothing("help", value)
        for name, meaning in _HELP:
            self.screen.say(f"{name:14}{meaning}")
        for sentence in _KEYS:
            self.screen.say(sentence)

    def _take_nothing(self, name: str, value: str) -> None:
        if value:
            raise UsageError(f"`/{name}` takes no value, and `{value[:60]}` was given", "/help lists the commands")

    def _save(self, value: str) -> None:
        force = value.startswith("--force ")
        named = value.removeprefix("--force ").strip()
        if not named:
            raise UsageError("`/save` needs the name of a file", "for example `/save conversation.md`")
        path = given_path(named)
        suffix = path.suffix.lower()
        if suffix not in (*_MARKDOWN, *_JSON):
            raise UsageError(
                f"`/save {named}` names neither a JSON nor a Markdown file", "end the name in .json or .md"
            )
        if not self.history.turns:
            raise UsageError("there is nothing to save: the conversation is empty")
        force = force or path.resolve() in self.saved
        _check(path, force)
        text = chat_markdown(self.history, self.speaker.target)
        if suffix in _JSON:
            text = json.dumps(self.document(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_file(path, text, force)
        self.saved.add(path.resolve())
        self.screen.say(f"saved {counted(len(self.history.turns), 'turn')} to {path}")


def _check(path: Path, force: bool) -> None:
    """Refuse a file that cannot be written, in the words of this command."""
    try:
        check_destination(path, force, "/save")
    except UsageError as error:
        hint = f"`/save --force {path}` overwrites it" if "already exists" in error.message else error.hint
        raise UsageError(error.message, hint) from None
