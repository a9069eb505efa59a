"""A stand-in for the wheel `xllamacpp`: its parameters' names, and a server with llama-server's own routes.

FAKE_LLAMACPP holds words with `=` and commas that say how it behaves: `die` (loads no model), `crash=N` (killed at the
N-th request), `differs` (another text with a draft). Every answer is the prompt's words again; with a draft, a step
accepts all of its tokens but the last.
"""

import json
import os
import signal
import sys
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

__version__ = "2026.10.11549"
WAYS = dict(one.partition("=")[::2] for one in os.environ.get("FAKE_LLAMACPP", "").split(",") if one)
TYPES = "none draft_simple draft_eagle3 draft_mtp ngram_simple ngram_map_k ngram_map_k4v ngram_mod ngram_cache count"
common_speculative_type = Enum(  # type: ignore[misc]
    "common_speculative_type", [f"COMMON_SPECULATIVE_TYPE_{name.upper()}" for name in TYPES.split()]
)


class Group(SimpleNamespace):
    """Parameters; setting one that the wheel has not is an error."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


def CommonParams() -> Group:
    """The wheel's parameters, as many as are used."""
    lookups = {
        name: Group(size_n=12, size_m=48, min_hits=1) for name in ("ngram_simple", "ngram_map_k", "ngram_map_k4v")
    }
    draft = Group(n_max=3, n_min=0, p_min=0.0, p_split=0.1, n_gpu_layers=-1, cpuparams=Group(n_threads=-1))
    vars(draft)["mparams"] = Group(path="")
    speculative = Group(types=[], synth_len=-1.0, synth_rates=[], draft=draft, **lookups)
    vars(speculative)["ngram_mod"] = Group(n_match=24, n_min=48, n_max=64)
    vars(speculative)["ngram_cache"] = Group(lookup_cache_static="", lookup_cache_dynamic="")
    numbers = dict.fromkeys(("n_ctx", "n_parallel", "n_batch", "n_ubatch", "cache_ram_mib", "n_gpu_layers"), 0)
    switches = dict.fromkeys(("endpoint_metrics", "cache_prompt", "kv_unified", "warmup", "use_jinja"), False)
    threads = {name: Group(n_threads=-1) for name in ("cpuparams", "cpuparams_batch")}
    texts = {"chat_template": "", "model_alias": set(), "hostnames": [], "port": 0, "verbosity": 3}
    return Group(model=Group(path=""), speculative=speculative, **numbers, **switches, **threads, **texts)


class Server(ThreadingHTTPServer):
    """llama.cpp's server: listens once it is made."""

    daemon_threads = True

    def __init__(self, params: Group) -> None:
        if "die" in WAYS:
            sys.stderr.write("0.00.004.194 E gguf_init_from_file: failed to open GGUF file 'x.gguf'\n")
            sys.stderr.write("0.00.004.655 E srv          init: exiting due to model loading error\n")
            raise RuntimeError("Failed to init server, please check the input params.")
        super().__init__((params.hostnames[0], params.port), Handler)
        self.lock, self.params = Lock(), params
        self.requests = self.drafts = self.drafted = self.accepted = self.generated = 0
        kind = params.speculative.types[0].name.removeprefix("COMMON_SPECULATIVE_TYPE_").lower()
        own = getattr(params.speculative, kind, None)
        sizes = {"none": 0, "ngram_mod": getattr(own, "n_max", 0)}
        self.k = sizes.get(kind, getattr(own, "size_m", params.speculative.draft.n_max))
        self.listening_address = f"http://{params.hostnames[0]}:{params.port}"
        Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that leaves is no error of the engine."""


def tokens_of(text: str) -> list[int]:
    """The ids of a text's words."""
    return [sum(map(ord, word)) for word in text.split()]


class Handler(BaseHTTPRequestHandler):
    """Its routes."""

    server: Server

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """Health, properties, models and metrics."""
        server, name = self.server, self.server.params.model.path
        values = {"tokens_predicted_total": server.generated}
        values["spec_decode_num_drafts_total"] = server.drafts
        values["spec_decode_num_draft_tokens_total"] = server.drafted
        values["spec_decode_num_accepted_tokens_total"] = server.accepted
        page = "".join(f"# TYPE llamacpp:{key} counter\nllamacpp:{key} {value}\n" for key, value in values.items())
        answers = {
            "/health": '{"status": "ok"}',
            "/props": '{"build_info": "b0-unknown"}',
            "/v1/models": json.dumps({"object": "list", "data": [{"id": name, "owned_by": "llamacpp"}]}),
            "/metrics": page if server.params.endpoint_metrics else "",
        }
        self._send(answers.get(self.path, "{}"), 200 if answers.get(self.path) else 404)

    def do_POST(self) -> None:
        """Tokens, templates and completions."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._send(json.dumps({"tokens": tokens_of(body["content"])}))
        elif self.path == "/apply-template":
            self._send(json.dumps({"prompt": f"user: {body['messages'][-1]['content']}"}))
        elif self.path == "/completions":
            self._complete(body)
        else:
            self._send(json.dumps({"path": self.path, "body": body}))

    def _complete(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.lock:
            server.requests += 1
            number = server.requests
        if number == int(WAYS.get("crash", 0)):
            os.kill(os.getpid(), signal.SIGKILL)
        prompt, most = body["prompt"], body["n_predict"]
        words = prompt.split() if isinstance(prompt, str) else [f"t{token}" for token in prompt]
        ids = tokens_of(prompt) if isinstance(prompt, str) else list(prompt)
        num_read = len(ids)
        words, ids = (words * most)[:most], (ids * most)[:most]
        if "differs" in WAYS and server.k:
            words[-1], ids[-1] = "otherwise", 7
        place = 0
        while place < most:
            size = 1 if place == 0 or not server.k else min(server.k, most - place)
            with server.lock:
                server.generated += size
                if place and server.k:
                    server.drafts += 1
                    server.drafted += server.k
                    server.accepted += size - 1
            place += size
        rows = [
            {"content": f" {word}", "tokens": [token], "stop": False} for word, token in zip(words, ids, strict=True)
        ]
        drafted = {"draft_n": 6, "draft_n_accepted": 4} if server.k else {}
        end = {"stop": True, "stop_type": "limit", "stopping_word": "", "timings": {"predicted_n": most} | drafted}
        end |= {"tokens_predicted": most, "tokens_evaluated": num_read}
        if body.get("stream"):
            if "withholds" in WAYS:  # as llama-server does inside a character of several tokens
                del rows[1]
            rows.append({"content": "", "tokens": []} | end)
            self._send("".join(f"data: {json.dumps(row)}\n\n" for row in rows), kind="text/event-stream")
            return
        tops = [{"id": 7, "token": "otherwise", "logprob": -1.01}, {"id": ids[0], "token": words[0], "logprob": -1.0}]
        likely = [{"id": token, "token": "x", "logprob": -0.5, "top_logprobs": tops} for token in ids]
        more = {"completion_probabilities": likely} if body.get("n_probs") else {}
        self._send(json.dumps({"content": " ".join(words), "tokens": ids} | end | more))

    def _send(self, text: str, status: int = 200, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())
