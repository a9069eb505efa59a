"""Project URLs of a build: the repository that it is made in, so that a fork's package names the fork."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class RepositoryLinks(MetadataHookInterface):
    """Sets `project.urls` from SPECDEC_REPOSITORY_URL or, in a clone, from the remote `origin` if it is on the web."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the links; none where the repository is not known."""
        home = (os.environ.get("SPECDEC_REPOSITORY_URL") or _origin()).removesuffix(".git").rstrip("/")
        metadata["urls"] = {}
        if home.startswith("https://"):
            pages = {"Documentation": "docs", "Changelog": "CHANGELOG.md"}
            metadata["urls"] = {"Repository": home, "Issues": f"{home}/issues"}
            metadata["urls"] |= {name: f"{home}/blob/main/{page}" for name, page in pages.items()}


def _origin() -> str:
    try:
        found = subprocess.run(["git", "remote", "get-url", "origin"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


def get_metadata_hook() -> type[MetadataHookInterface]:
    """What hatchling asks for."""
    return RepositoryLinks
