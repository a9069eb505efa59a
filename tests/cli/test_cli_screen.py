"""What is said while a command loads: words that come and go, and lines that stay."""

import io
import logging

import pytest
from rich.console import Console

from specdec_cli.cli.screen import progress
from specdec_cli.report.view import Screen


@pytest.mark.parametrize(("is_quiet", "said"), [(False, "compiling, once\n"), (True, "")])
def test_what_the_package_logs_while_it_loads_stays(monkeypatch: pytest.MonkeyPatch, is_quiet: bool, said: str) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    screen = Screen(io.StringIO(), False, Console(file=stream, color_system=None), False, False, is_quiet)
    logger = logging.getLogger("specdec_cli")
    before = logger.level, list(logger.handlers)
    with progress(screen) as say:
        say("loading [target]")
        logging.getLogger("specdec_cli.lm.llama.library").info("compiling, %s", "once")
        logging.getLogger("torch.somewhere").info("not ours")
    assert stream.getvalue() == said
    assert (logger.level, logger.handlers) == before
