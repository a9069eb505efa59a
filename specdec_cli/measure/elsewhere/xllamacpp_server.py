"""A stand-in for `llama-server` out of the wheel `xllamacpp`, which has llama.cpp's server but no program for it.

It runs in the Python that has the wheel, which need not have specdec: `python xllamacpp_server.py --model FILE ...`
takes llama-server's names of the options below, serves until SIGTERM, and exits with 1 where nothing is served.
"""

import argparse
import signal
import sys
from operator import attrgetter
from threading import Event
from typing import Any

import xllamacpp

_TEXTS = {
    "model": "model.path",
    "spec-draft-model": "speculative.draft.mparams.path",
    "chat-template": "chat_template",
    "lookup-cache-static": "speculative.ngram_cache.lookup_cache_static",
    "lookup-cache-dynamic": "speculative.ngram_cache.lookup_cache_dynamic",
}
_NUMBERS = {
    "port": "port",
    "ctx-size": "n_ctx",
    "parallel": "n_parallel",
    "batch-size": "n_batch",
    "ubatch-size": "n_ubatch",
    "cache-ram": "cache_ram_mib",
    "threads": "cpuparams.n_threads",
    "threads-batch": "cpuparams_batch.n_threads",
    "n-gpu-layers": "n_gpu_layers",
    "verbosity": "verbosity",
    "spec-draft-n-max": "speculative.draft.n_max",
    "spec-draft-n-min": "speculative.draft.n_min",
    "spec-draft-ngl": "speculative.draft.n_gpu_layers",
    "spec-draft-threads": "speculative.draft.cpuparams.n_threads",
    "spec-ngram-mod-n-match": "speculative.ngram_mod.n_match",
    "spec-ngram-mod-n-min": "speculative.ngram_mod.n_min",
    "spec-ngram-mod-n-max": "speculative.ngram_mod.n_max",
} | {
    f"spec-{kind}-{size}": f"speculative.{kind}.{size}".replace("-", "_")
    for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
    for size in ("size-n", "size-m", "min-hits")
}
_FRACTIONS = {
    "spec-draft-p-min": "speculative.draft.p_min",
    "spec-draft-p-split": "speculative.draft.p_split",
    "spec-synth-len": "speculative.synth_len",
}
_SWITCHES = {
    "metrics": "endpoint_metrics",
    "cache-prompt": "cache_prompt",
    "kv-unified": "kv_unified",
    "warmup": "warmup",
    "jinja": "use_jinja",
}


def parser() -> argparse.ArgumentParser:
    """The options that this program has."""
    made = argparse.ArgumentParser(prog="llama-server", allow_abbrev=False)
    for names, kind in ((_TEXTS, str), (_NUMBERS, int), (_FRACTIONS, float)):
        for name in names:
            made.add_argument(f"--{name}", type=kind)
    for name in _SWITCHES:
        made.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--alias")
    made.add_argument("--chat-template-file")
    made.add_argument("--spec-type", default="none")
    made.add_argument("--spec-synth-rates")
    return made


def params_of(given: argparse.Namespace) -> Any:
    """The wheel's parameters for a command line.

    Raises:
        ValueError: a type of speculation that the wheel does not have, or rates that are no numbers.
        OSError: the file of a chat template cannot be read.
    """
    params = xllamacpp.CommonParams()
    for names in (_TEXTS, _NUMBERS, _FRACTIONS, _SWITCHES):
        for name, path in names.items():
            value = getattr(given, name.replace("-", "_"))
            if value is not None:
                owner, _, attribute = path.rpartition(".")
                setattr(attrgetter(owner)(params) if owner else params, attribute, value)
    params.hostnames = [given.host]
    if given.alias:
        params.model_alias = set(given.alias.split(","))
    if given.chat_template_file:
        with open(given.chat_template_file, encoding="utf-8") as template:
            params.chat_template = template.read()
    params.speculative.types = [_type_of(name) for name in given.spec_type.split(",")]
    if given.spec_synth_rates:
        params.speculative.synth_rates = [float(rate) for rate in given.spec_synth_rates.split(",")]
    return params


def _type_of(name: str) -> Any:
    types = xllamacpp.common_speculative_type.__members__
    found = types.get(f"COMMON_SPECULATIVE_TYPE_{name.upper().replace('-', '_')}")
    if found is None or name.upper() == "COUNT":
        known = ", ".join(key.removeprefix("COMMON_SPECULATIVE_TYPE_").lower().replace("_", "-") for key in types)
        raise ValueError(f"unknown speculative type: {name} (known: {known})")
    return found


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    ended = Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    program = parser()
    given = program.parse_args()
    sys.stdout.write(f"version: b{xllamacpp.__version__.rpartition('.')[2]} (xllamacpp {xllamacpp.__version__})\n")
    sys.stdout.flush()
    try:
        server = xllamacpp.Server(params_of(given))
    except (ValueError, OSError, RuntimeError, AttributeError) as error:
        program.exit(1, f"xllamacpp: {error}\n")
    sys.stdout.write(f"listening on {server.listening_address}\n")
    sys.stdout.flush()
    ended.wait()


if __name__ == "__main__":
    main()
