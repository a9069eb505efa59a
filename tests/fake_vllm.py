"""A stand-in for vLLM's `vllm serve`: its command line, `/health`, completions, metrics, and how it fails.

FAKE_VLLM holds words with `=` and commas that say how it behaves: `die` (before it is ready), `never` (never ready),
`deaf` (ignores SIGTERM), `crash=N` (killed at the N-th request), `busy=FILE` (its port is taken until FILE exists),
`version=1.2.3`, `stuck` (listens, and loads for ever), `cut=N` (killed after the N-th event of a stream),
`differs` (another text with a draft), `seen=FILE` (writes its arguments there), `shared` (its metrics count as many
drafts of other clients), `ragged` (a step drafts no more than the answer still needs).
Every answer is the prompt's words again; with a draft, a step accepts all of its tokens but the last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

TRACEBACK = """\
(EngineCore pid=7) ERROR 11-26 20:00:00 [core.py:1100] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-26 20:00:00 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-26 20:00:00 [core.py:1100]   File "/v/core.py", line 1, in run_engine_core
(EngineCore pid=7) ERROR 11-26 20:00:00 [core.py:1100]     engine_core = EngineCoreProc(*args)
(EngineCore pid=7) ERROR 11-26 20:00:00 [core.py:1100] ValueError: the weights of `model` are torn
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "/v/api_server.py", line 9, in main
(APIServer pid=1)     uvloop.run(run_server(args))
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
REFUSAL = """\
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "/v/arg_utils.py", line 9, in create_speculative_config
(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
(APIServer pid=1)   Value error, Unsupported speculative method: 'medusa' [type=value_error, input_value={}]
(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2.11/v/value_error
"""
_ways = os.environ.get("FAKE_VLLM", "")
WAYS = dict(one.partition("=")[::2] for one in _ways.split(",") if one)
SAID: set[int] = set()
MARK = f"fake-vllm-of={sys._xoptions.get('fake-vllm-of', 'none')}"


def command_of(process: int) -> list[str]:
    """The words that start it, marked with the process whose test it is."""
    return [sys.executable, "-S", "-X", f"fake-vllm-of={process}", __file__]


def running(process: int) -> list[int]:
    """What runs of the stand-ins of a process, and of what they started."""
    import psutil

    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE and f"fake-vllm-of={process}" in one.cmdline():
                found.append(one.pid)
    return found


class Counts:
    """What vLLM counts."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.requests = self.drafts = self.drafted = self.accepted = self.generated = self.aborted = 0


class Server(ThreadingHTTPServer):
    """The fake's state."""

    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((options.host, options.port), Handler)
        self.options, self.counts = options, Counts()
        given = options.speculative_config
        self.k = int(json.loads(given)["num_speculative_tokens"]) if given else 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that leaves is no error of the engine."""


class Handler(BaseHTTPRequestHandler):
    """Its routes."""

    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing: vLLM's own lines are enough."""

    def do_GET(self) -> None:
        """Health, version, models and metrics."""
        if self.path == "/health":
            self._send("" if "never" not in WAYS else "loading", 200 if "never" not in WAYS else 503)
        elif self.path == "/version":
            self._send(json.dumps({"version": WAYS.get("version", "0.33.0")}))
        elif self.path == "/v1/models":
            name = self.server.options.served_model_name or [self.server.options.model]
            self._send(json.dumps({"object": "list", "data": [{"id": name[0], "owned_by": "vllm"}]}))
        elif self.path == "/server_info":
            self._send(json.dumps({"secret": "for the engine's owner"}))
        elif self.path == "/metrics":
            self._send(metrics(self.server), kind="text/plain")
        else:
            self._send("{}", 404)

    def do_POST(self) -> None:
        """A completion, streamed."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "echo" in WAYS:
            self._send(json.dumps({"path": self.path, "headers": dict(self.headers.items()), "body": body}))
            return
        counts = self.server.counts
        with counts.lock:
            counts.requests += 1
            number = counts.requests
        if number == int(WAYS.get("crash", 0)):
            sys.stderr.write(
                "(EngineCore pid=7) ERROR 11-26 20:00:00 [core.py:1] torch.OutOfMemoryError: no room left\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        if not body.get("stream"):
            answer = one_token(body) if body["max_tokens"] == 1 else self._whole(body)
            self._send(json.dumps(answer))
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.num_events = 0
        try:
            self._stream(body)
        except (BrokenPipeError, ConnectionResetError):
            with counts.lock:
                counts.aborted += 1
            self.close_connection = True

    def _stream(self, body: dict[str, Any]) -> None:
        counts, k = self.server.counts, self.server.k
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        words = (str(prompt).split() * body["max_tokens"])[: body["max_tokens"]]
        SAID.update(sum(map(ord, word)) for word in words)
        if "differs" in WAYS and k:
            words[-1] = "otherwise"
        place, steps = 0, list[tuple[int, int]]()
        while place < len(words):
            size = 1 if place == 0 or not k else min(k, len(words) - place)
            with counts.lock:
                counts.generated += size
                if place and k:
                    steps.append((size if "ragged" in WAYS else k, size - 1))
                    counts.drafts += 1
                    counts.drafted += steps[-1][0]
                    counts.accepted += size - 1
            piece = words[place : place + size]
            place += size
            tokens = [sum(map(ord, word)) for word in piece]
            ids = {"token_ids": tokens} if body.get("return_token_ids") else {}
            end = "length" if place == len(words) else None
            text = "".join(f" {word}" for word in piece)
            field = {"delta": {"content": text}} if "messages" in body else {"text": text}
            self._event({"choices": [{"index": 0, **field, **ids, "finish_reason": end}]})
        usage = {"prompt_tokens": len(str(prompt).split()), "completion_tokens": len(words)}
        level = self.server.options.per_request_spec_decode_metrics
        stats = spec_decode_metrics(steps, k, level) if level in ("summary", "detailed") and k else None
        self._event({"choices": [], "usage": usage, "metrics": {"speculative_decoding": stats}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer with its tokens' ids and log-probabilities, letter by letter of the prompt."""
        ids = [ord(letter) % 100 for letter in str(body["prompt"])]
        output = (ids * body["max_tokens"])[: body["max_tokens"]]
        logprobs = {"token_logprobs": [-0.5] * len(output)}
        choice = {"index": 0, "text": "", "prompt_token_ids": ids, "token_ids": output, "logprobs": logprobs}
        return {"choices": [choice]}

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(f"data: {json.dumps(value)}\n\n".encode())
        self.num_events += 1
        if self.num_events == int(WAYS.get("cut", 0)):
            os.kill(os.getpid(), signal.SIGKILL)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, text: str, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


def spec_decode_metrics(steps: list[tuple[int, int]], k: int, level: str) -> dict[str, Any]:
    """A request's acceptance, from the drafted and accepted tokens of its steps."""
    drafted, accepted = [drafted for drafted, _ in steps], [accepted for _, accepted in steps]
    listed = {"per_step_accepted": accepted, "per_step_drafted": drafted} if accepted and level == "detailed" else {}
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(accepted) if accepted else 1.0,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if accepted else 0.0,
        "acceptance_histogram": [accepted.count(num) for num in range(k + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": k,
    } | listed


def one_token(body: dict[str, Any]) -> dict[str, Any]:
    """An answer that is not streamed: the prompt's ids, and two tokens that are almost as likely."""
    gap = float(WAYS.get("gap", "0.01"))
    likely = {f"token_id:{token}": -1.0 for token in SAID}
    top = likely | {f"token_id:{sum(map(ord, 'otherwise'))}": -1.0 - gap}
    choice = {"index": 0, "text": "x", "prompt_token_ids": [1, 2], "logprobs": {"top_logprobs": [top]}}
    return {"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}


def metrics(server: Server) -> str:
    """vLLM's counters in Prometheus text."""
    counts, name, times = server.counts, server.options.model, 2 if "shared" in WAYS else 1
    values = {"generation_tokens": counts.generated, "aborted": counts.aborted}
    if server.k:
        values |= {
            "spec_decode_num_drafts": times * counts.drafts,
            "spec_decode_num_draft_tokens": times * counts.drafted,
            "spec_decode_num_accepted_tokens": times * counts.accepted,
        }
    return "".join(
        f'# TYPE vllm:{key}_total counter\nvllm:{key}_total{{model_name="{name}"}} {value}\n'
        for key, value in values.items()
    )


def options() -> argparse.Namespace:
    """The command line, as much of it as specdec writes."""
    parser = argparse.ArgumentParser(prog="vllm serve")
    parser.add_argument("serve", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--speculative-config")
    parser.add_argument("--per-request-spec-decode-metrics")
    for name in ("dtype", "max-model-len", "max-num-seqs", "tensor-parallel-size", "pipeline-parallel-size"):
        parser.add_argument(f"--{name}")
    for name in ("distributed-executor-backend", "override-generation-config", "generation-config", "revision"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--enforce-eager", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Start as vLLM does: read, bind, start an engine core, load, listen."""
    given = options()
    if "seen" in WAYS:
        with Path(WAYS["seen"]).open("a", encoding="utf-8") as seen:
            seen.write(json.dumps(sys.argv[1:]) + "\n")
    if "busy" in WAYS and not Path(WAYS["busy"]).exists():
        Path(WAYS["busy"]).touch()
        sys.exit("OSError: [Errno 98] Address already in use")
    if "deaf" in WAYS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeping = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    core = sleeping if "deaf" in WAYS else "import time; time.sleep(600)"
    subprocess.Popen([sys.executable, "-S", "-X", MARK, "-c", core])  # the engine core, of the same process group
    print("(APIServer pid=1) INFO 11-26 20:00:00 [api_server.py:1] vLLM API server version 0.33.0", flush=True)
    if "medusa" in (given.speculative_config or ""):
        sys.exit(REFUSAL)
    if "die" in WAYS:
        sys.exit(TRACEBACK)
    server = Server(given)
    print("(APIServer pid=1) INFO 11-26 20:00:00 [launcher.py:1] Loading model weights", flush=True)
    if "stuck" in WAYS:
        time.sleep(600)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
