"""Limits for the chat templates that transformers renders, put where transformers compiles them.

transformers 5.17 to 5.24 compile a template in `_compile_jinja_template`. A template of ours, which is a comment,
gives an environment with the filters and functions of that version; then it gets limits and the real template.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from transformers.utils import chat_template_utils

from specdec_cli.template_limits import limited

_compile = chat_template_utils._compile_jinja_template


@lru_cache(maxsize=32)
def _compile_limited(chat_template: str) -> Any:
    """A compiled template that cannot take more than a few seconds."""
    comment = "{# " + hashlib.sha256(chat_template.encode("utf-8", "surrogatepass")).hexdigest() + " #}"
    return limited(_compile(comment).environment).from_string(chat_template)


def limit_templates() -> None:
    """Let transformers render templates within limits, from now on."""
    chat_template_utils._compile_jinja_template = _compile_limited
