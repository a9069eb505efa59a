"""Training runs of tiny random targets, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.engine.engine import Engine
from specdec_cli.recipe.schema import Recipe, Target, Train
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.train.folder import TrainingFolder
from specdec_cli.train.processes import Processes
from specdec_cli.train.session import TrainingData, TrainingSession

PROMPTS = [[5 + i, 17, 30 + 2 * i, 44, 9 + i][: 3 + i % 3] for i in range(12)]


def tiny_target(folder: Path, layers: int = 4, **shape: float) -> str:
    """A random Llama with a tokenizer; the name to load it by."""
    made = make_tiny("llama", folder, 1, num_hidden_layers=layers, **shape)
    letter_tokenizer().save_pretrained(made)
    return str(made)


def session(target: str, folder: Path, is_resumed: bool = False, **settings: Any) -> TrainingSession:
    """A session on a tiny target; its folder has begun."""
    settings = {"num_held_out": 2, "batch_size": 4, "epochs": 2, "depth": 3, **settings}
    recipe = Recipe(target=Target(model=target), train=Train(**settings))
    engine = Engine.load(target, None, max_num_seqs=8)
    data = TrainingData.of(PROMPTS, engine.target.max_context, recipe.train.num_held_out, 1)
    begun = TrainingFolder(folder)
    begun.begin({"data": data.identity}, "", is_resumed, force=False)
    return TrainingSession(engine, recipe, data, SamplingParams(max_new_tokens=21), begun, Processes())


def never() -> bool:
    """Whether to stop."""
    return False


def ignore(_done: int, _total: int) -> None:
    """Take progress."""
