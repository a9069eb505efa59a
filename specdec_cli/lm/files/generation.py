"""A checkpoint's `generation_config.json`: its default sampling parameters and end tokens.

That of a GGUF file is made of its metadata (`gguf_folder`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec_cli.errors import RunError
from specdec_cli.files import given_path
from specdec_cli.lm.files.gguf_folder import gguf_source
from specdec_cli.lm.files.names import AUTO, NONE, check_generation_config
from specdec_cli.lm.files.names import GENERATION_FILE as FILE
from specdec_cli.lm.files.reading import read_object

_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_new_tokens",
    "stop_strings": "stop",
}
"""transformers' keys and the sampling parameters that mean the same."""
_UNUSED: Mapping[str, Any] = {
    key: neutral
    for keys, neutral in (
        ("num_beams num_return_sequences num_beam_groups", 1),
        ("typical_p encoder_repetition_penalty guidance_scale", 1.0),
        ("no_repeat_ngram_size encoder_no_repeat_ngram_size min_length min_new_tokens", 0),
        ("epsilon_cutoff eta_cutoff penalty_alpha diversity_penalty", 0.0),
        ("max_length", 20),
        ("bad_words_ids force_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id", None),
        ("forced_eos_token_id sequence_bias exponential_decay_length_penalty top_h dola_layers", None),
        ("watermarking_config constraints max_time", None),
        ("general.sampling.xtc_probability general.sampling.mirostat", 0),
        ("general.sampling.penalty_last_n", -1),
        ("general.sampling.sequence", None),
    )
    for key in keys.split()
}
"""Keys that change a text and that this engine does not apply, with the values at which they change nothing.

Those of GGUF files keep their names.
"""
_HINT = "correct the file, or leave it unread with --generation-config none"


@dataclass(frozen=True, slots=True)
class Generation:
    """The settings that a checkpoint suggests.

    Args:
        sampling: fields of SamplingParams for requests that do not set them.
        eos_token_ids: tokens that end a text; empty where the file names none.
        unused: keys that ask for something that is not applied, with their values.
        source: the file, for messages; None where there is none.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    unused: Mapping[str, Any] = field(default_factory=dict)
    source: str | None = None

    @property
    def words(self) -> str:
        """The sampling parameters in words; empty where none is set."""
        return ", ".join(f"{name} {_shown(value)}" for name, value in self.sampling.items())


def _shown(value: Any) -> str:
    return "off" if value is None else json.dumps(value, ensure_ascii=False)


def read_generation(folder: Path, wanted: str = AUTO) -> Generation:
    """The generation configuration that holds for a model.

    Args:
        folder: of the model.
        wanted: auto (the model's own file), none (only the end tokens of that file), or another folder with such a
            file, whose end tokens hold where it names some.

    Raises:
        UsageError: the other folder has no such file.
        RunError: a file that is broken, or a value in it that is wrong.
    """
    own = folder / FILE
    check_generation_config(wanted)
    if wanted in (AUTO, NONE):
        return _read(own, wanted == AUTO) if own.is_file() else Generation()
    other = given_path(wanted) / FILE
    generation = _read(other, True)
    if generation.eos_token_ids or not own.is_file():
        return generation
    return Generation(generation.sampling, _read(own, False).eos_token_ids, generation.unused, generation.source)


def _read(path: Path, samples: bool) -> Generation:
    given, path = read_object(path), gguf_source(path.parent) or path  # messages name the file that says it
    eos = _eos_token_ids(path, given.get("eos_token_id"))
    if not samples:
        return Generation(eos_token_ids=eos, source=str(path))
    unused = {key: given[key] for key, neutral in _UNUSED.items() if given.get(key) not in (None, [], neutral)}
    return Generation(_sampling(path, given), eos, unused, str(path))


def _eos_token_ids(path: Path, given: Any) -> tuple[int, ...]:
    listed = given if isinstance(given, list) else [] if given is None else [given]
    if not all(_is_whole(token) and token >= 0 for token in listed):
        hint = "correct the file: its end tokens are read whatever --generation-config says"
        raise _wrong(path, "eos_token_id", "a token id or a list of them", given, hint)
    return tuple(listed)


def _sampling(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters by their names here; what is null is not set."""
    sampling: dict[str, Any] = {}
    for key, name in _FIELDS.items():
        value = given.get(key)
        if value is None:
            continue
        fits, words = _KINDS[key]
        if not fits(value):
            raise _wrong(path, key, words, value)
        sampling[name] = value
    if "top_k" in sampling:  # 0 and below keep all
        sampling["top_k"] = sampling["top_k"] if sampling["top_k"] > 0 else None
    if "stop" in sampling:
        sampling["stop"] = tuple([sampling["stop"]] if isinstance(sampling["stop"], str) else sampling["stop"])
    return sampling | _greedy(path, given)


def _greedy(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Temperature 0 for an explicit `do_sample: false`, not for one that saving a model has added."""
    samples = given.get("do_sample")
    if samples is not None and not isinstance(samples, bool):
        raise _wrong(path, "do_sample", "true or false", samples)
    return {"temperature": 0.0} if samples is False and not given.get("_from_model_config") else {}


def _wrong(path: Path, key: str, words: str, value: Any, hint: str = _HINT) -> RunError:
    message = json.dumps(value, ensure_ascii=False)[:60]
    return RunError(f"`{path}`: `{key}` must be {words}, not `{message}`", hint)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(fits: Callable[[float], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int | float) and not isinstance(value, bool) and fits(value)


def _texts(value: Any) -> bool:
    listed = [value] if isinstance(value, str) else value
    return isinstance(listed, list) and all(isinstance(text, str) and text for text in listed)


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (_number(lambda value: 0 <= value < float("inf")), "a number of at least 0"),
    "top_p": (_number(lambda value: 0 < value <= 1), "a number above 0 and at most 1"),
    "top_k": (lambda value: _is_whole(value) and value < 2**31, "a whole number"),
    "min_p": (_number(lambda value: 0 <= value <= 1), "a number from 0 to 1"),
    "repetition_penalty": (_number(lambda value: 0 < value < float("inf")), "a number above 0"),
    "max_new_tokens": (lambda value: _is_whole(value) and 0 < value < 2**31, "a whole number of at least 1"),
    "stop_strings": (_texts, "a text or a list of texts"),
}
