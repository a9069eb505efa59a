"""A server of toys for tests: the toy engine behind the application, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tokenizers
from starlette.testclient import TestClient
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as ByteLevelSplit
from toy_engine import LETTERS, toy_engine
from transformers import PreTrainedTokenizerFast

from specdec_cli.engine.engine import Engine
from specdec_cli.recipe.schema import Serve
from specdec_cli.serve.http.app import create_app
from specdec_cli.serve.models import Model, Models
from specdec_cli.serve.settings import Settings
from specdec_cli.text.tokenizer import Tokenizer

HERE = "http://127.0.0.1"


def letters() -> Tokenizer:
    """The toy engine's tokens as a real byte-level tokenizer, with a chat template; unknown bytes are `a`."""
    as_bytes = ByteLevelSplit(add_prefix_space=False, use_regex=False)
    words = ["</s>", *(as_bytes.pre_tokenize_str(letter)[0][0] for letter in LETTERS[1:])]
    known = tokenizers.Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="a"))
    known.pre_tokenizer, known.decoder = as_bytes, ByteLevel()
    hf = PreTrainedTokenizerFast(tokenizer_object=known, eos_token=words[0])
    hf.chat_template = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    return Tokenizer(hf)


def served_engine(engine: Engine) -> Engine:
    """The engine, with that tokenizer where it has no real one."""
    if not isinstance(engine.tokenizer, Tokenizer):
        engine.tokenizer = letters()
    return engine


def toy_models(settings: Settings, engine: Engine | None = None, load: bool = True) -> Models:
    """One model, `toy`, loaded already."""
    model = Model("toy", lambda: served_engine(engine or toy_engine()), settings.serve)
    models = Models([model], settings.serve.hang_timeout_seconds)
    if load:
        models.all[0].load()
        assert models.all[0].state == "ready", models.all[0].failure
    return models


class ToyClient(TestClient):
    """A client that knows the models behind it."""

    models: Models


@contextmanager
def toy_client(
    engine: Engine | None = None, keys: tuple[str, ...] = (), models: Models | None = None, **serve: Any
) -> Iterator[ToyClient]:
    """A client of a served toy; `models` is at `client.models`."""
    settings = Settings(Serve(**serve), keys)
    models = models or toy_models(settings, engine)
    try:
        with ToyClient(create_app(models, settings), base_url=HERE, raise_server_exceptions=False) as client:
            client.models = models
            yield client
    finally:
        assert models.stop(), "an engine's thread goes on"
