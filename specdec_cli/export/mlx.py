"""mlx-lm on Apple silicon: `mlx_lm.server` with `--draft-model`.

The options are those of mlx-lm 0.32.2. It accepts a drafted token where the target draws the same one, and serves one
request at a time while it drafts.
"""

from __future__ import annotations

from typing import Any

from specdec_cli.export.draft_kind import DRAFT_MODEL
from specdec_cli.export.exported import Export, ExportJob, flags, script

NAME, VERSION = "mlx-lm", "0.32.2"
_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_new_tokens",
}


def export(job: ExportJob) -> Export:
    """A script that starts the server."""
    settings = job.settings
    host, port = settings.address
    arguments: dict[str, Any] = {"model": settings.target, "host": host, "port": port}
    if settings.k:
        if settings.draft.method == DRAFT_MODEL:
            arguments |= {"draft_model": settings.draft_model, "num_draft_tokens": settings.k}
            settings.chains_only()
            settings.one_k()
            settings.exact_match()
            settings.warn("mlx-lm does not batch requests while it drafts")
        else:
            settings.no_counterpart()
    for option, name in _SAMPLING.items():
        value = settings.given(f"sampling.{name}")
        arguments |= {} if value is None else {option: value}
    settings.leave_to_requests(but=_SAMPLING.values())
    following = settings.next_command()
    words = ["mlx_lm.server", *flags(arguments)]
    return Export({"mlx.sh": script(job.comment(following), words)}, frozenset({"mlx.sh"}), following)
