"""Model text made safe for a terminal: a model may write anything, escape sequences included."""

from __future__ import annotations

import re

# CSI (cursor, colours), OSC (titles, links; ended by BEL or ST), other two-character escapes, then single controls.
_UNPRINTABLE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]"
)


def printable(text: str) -> str:
    r"""The text without control characters and ANSI escapes; `\n` and `\t` stay.

    An escape cut in two by streaming loses its control character in the first part, so it never acts; the harmless
    rest of it is then shown.
    """
    return _UNPRINTABLE.sub("", text)
