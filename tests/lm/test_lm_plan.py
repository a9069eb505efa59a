"""A model's plan: its files are read once, and its obstacles are the same sentences for loading and for doctor."""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gguf import write_gguf
from tiny_models import make_tiny

from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.facts import model_facts
from specdec_cli.lm.load import load_model
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.plan_checks import check_target
from specdec_cli.lm.settings import ModelSettings

_OPENED: Counter[str] = Counter()
sys.addaudithook(lambda event, args: _count(args) if event == "open" else None)


def _count(args: tuple[Any, ...]) -> None:
    if isinstance(args[0], str) and args[0].endswith("/config.json") and args[1] in ("r", "rb"):
        _OPENED[args[0]] += 1


def _gguf(folder: Path) -> str:
    path = folder / "model.gguf"
    write_gguf(make_tiny("llama", folder / "source", hidden_size=64, intermediate_size=64), path, "Q8_0")
    return str(path)


@pytest.mark.parametrize("make", [
    lambda folder: str(make_tiny("llama", folder)), _gguf, lambda _: "builtin:target",
], ids=["safetensors", "gguf", "builtin"])  # fmt: skip
@pytest.mark.parametrize("use", [load_model, model_facts], ids=["load", "facts"])
def test_a_configuration_is_read_once(
    tmp_path: Path, make: Callable[[Path], str], use: Callable[[ModelPlan], object]
) -> None:
    plan = ModelPlan(make(tmp_path))
    _OPENED.clear()
    use(plan)
    assert list(_OPENED.values()) == [1]
    check_target(plan, 16)
    assert plan.num_layers > 0
    assert list(_OPENED.values()) == [1], "whoever has the plan asks the folder nothing more"


def test_every_obstacle_is_listed_and_loading_raises_the_first(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path)
    (folder / "generation_config.json").write_text("[]")
    settings = ModelSettings(compute="native")
    plan = ModelPlan(str(folder), settings, "graphs")
    said = [one.message for one in plan.obstacles]
    assert len(said) == 3
    for words in ("is for a GPU", "as its file holds it", "holds no JSON object"):
        assert any(words in message for message in said), words
    with pytest.raises(UsageError) as caught:
        load_model(plan)
    assert caught.value.message == said[0]


def test_a_device_that_is_elsewhere_is_no_fault_of_the_model(tmp_path: Path) -> None:
    plan = ModelPlan(str(make_tiny("llama", tmp_path)), ModelSettings(device="cuda:77"))
    assert (plan.faults, plan.device) == ((), torch.device("cuda:77"))
    assert [one.message for one in plan.obstacles] == ["device `cuda:77` is not here"]
    assert model_facts(plan).num_parameters > 0
    with pytest.raises(RunError, match="is not here"):
        load_model(plan)
