"""How each engine's server is asked, by the engine's name."""

from __future__ import annotations

from specdec_cli.measure.endpoint.endpoint import Endpoint

PROTOCOLS: dict[str, type[Endpoint]] = {"vllm": Endpoint}
