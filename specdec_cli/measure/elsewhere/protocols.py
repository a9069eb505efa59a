"""How each engine's server is asked, by the engine's name."""

from __future__ import annotations

from specdec_cli.measure.endpoint.endpoint import Endpoint
from specdec_cli.measure.endpoint.llamacpp import LlamaCppEndpoint

PROTOCOLS: dict[str, type[Endpoint]] = {"vllm": Endpoint, "llamacpp": LlamaCppEndpoint}
