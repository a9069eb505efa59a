"""Drafts with another tokenizer as a person meets them: a notice, the overlap in documents, one table with others."""

import json
from pathlib import Path
from typing import Any

import pytest
from schemas import assert_fits
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.cli.main import run
from specdec_cli.measure.bench import compare
from specdec_cli.measure.documents.compare_drafts import CompareDocument
from specdec_cli.measure.documents.generate import GenerateDocument

PROMPT = "the end of the thing"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, and a draft whose tokenizer has one merge less."""
    folder = tmp_path_factory.mktemp("universal")
    for role, without, layers in (("target", "", 2), ("draft", "he", 1)):
        made = make_tiny("llama", folder / role, layers, vocab_size=96, num_hidden_layers=layers)
        letter_tokenizer(without=without).save_pretrained(made)
    return {role: str(folder / role) for role in ("target", "draft")}


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    assert run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize(("temperature", "ceiling"), [("0", False), ("0.8", True)])
def test_generate_says_how_it_drafts(capsys: pytest.CaptureFixture[str], pair, temperature: str, ceiling: bool) -> None:
    sampling = ("--temperature", temperature, "--max-new-tokens", "12")
    found, err = document(capsys, "generate", "-t", pair["target"], "-d", pair["draft"], *sampling, PROMPT)
    assert_fits(found, GenerateDocument)
    assert "it drafts by text at temperature 0, by the shared tokens above it; 86 tokens" in err
    shared = found["environment"]["draft_vocabulary"]
    assert shared["num_shared_by_text"] == 86
    assert 0 < shared["share_of_output"] <= 1
    rate = found["outputs"][0]["speculative"]["acceptance_rate"]
    assert not ceiling or rate <= shared["share_of_output"]


def test_compare_drafts_takes_both_ways_beside_others(
    capsys: pytest.CaptureFixture[str], pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_PROFILE_SECONDS", 0.0)
    monkeypatch.setattr(compare, "_MIN_PROFILE_SECONDS", 0.0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    by_tokens = f"universal:model={pair['draft']},match=intersection"
    drafts = [word for draft in (pair["draft"], by_tokens, "ngram", "none") for word in ("-d", draft)]
    few = ("--max-new-tokens", "12", "--k-max", "2", "--repeats", "1", "--dataset", str(prompts))
    found, _ = document(capsys, "compare-drafts", "-t", pair["target"], *drafts, *few)
    assert_fits(found, CompareDocument)
    rows = {row["draft"]: row for row in found["rows"]}
    assert [rows[draft]["method"] for draft in (pair["draft"], by_tokens, "ngram")] == ["universal"] * 2 + ["ngram"]
    assert [rows[draft]["vocabulary"] is None for draft in (pair["draft"], by_tokens, "ngram")] == [False, False, True]
    assert all(rows[draft]["predicted"] for draft in (pair["draft"], by_tokens))
    assert any(notice.startswith(f"{by_tokens}: the draft's tokenizer") for notice in found["notices"])
