from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from expected_counts import expected_counts
from safetensors.numpy import save_file
from tiny_models import VOCAB, make_tiny
from toy_engine import LETTERS, LetterTokenizer, TableLM, toy_engine
from typed import not_none, stand_in

from specdec_cli.drafters import create
from specdec_cli.drafters.contract import Resources
from specdec_cli.engine.decoding import Request
from specdec_cli.engine.engine import Engine
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.prompts import PromptRow
from specdec_cli.errors import RunError, UsageError
from specdec_cli.lm.door import Row
from specdec_cli.lm.files.origin import Origin
from specdec_cli.lm.load import load_lm
from specdec_cli.measure.predict import traced as traced_room
from specdec_cli.measure.predict import tracing
from specdec_cli.measure.predict.draft_trace import RANK_BEYOND, GuessTrace, ModelTrace
from specdec_cli.measure.predict.replay import replay
from specdec_cli.measure.predict.trace import load
from specdec_cli.measure.predict.traced import obtain_trace
from specdec_cli.measure.predict.tracing import trace_draft, trace_target
from specdec_cli.sampling import noise
from specdec_cli.sampling.chain import Distribution
from specdec_cli.sampling.draft import likely_children, ranks
from specdec_cli.sampling.params import SamplingParams

PROMPTS = ("abc", "hello deaf cab", "g", "bad egg cafe face")


def requests(engine, **changes):
    params = SamplingParams(
        **stand_in({"max_new_tokens": 20, "temperature": 0.9, "logit_bias": {3: 0.5}, "stop": ("zz",)} | changes)
    )
    rows = [PromptRow(i, text, category="ab"[i % 2]) for i, text in enumerate(PROMPTS)]
    return [Request(row, engine.encode(row.prompt), replace(params, index=row.index)) for row in rows]


def model_drafter(lm):
    drafter = create("model", {"model": "draft"})
    drafter.load(Resources(lambda name: lm, None, len(LETTERS)))
    return drafter


@pytest.fixture
def engine():
    return toy_engine()


@pytest.fixture
def trace(engine):
    made = trace_target(engine, requests(engine))
    made.drafts["model"] = trace_draft(made, model_drafter(TableLM(1)), 4)
    made.drafts["ngram"] = trace_draft(made, engine.drafter, 4)
    return made


def test_the_numbers_are_those_of_the_chain(trace) -> None:
    """p, q and the noise once more, one position at a time."""
    flat = 0
    target, draft = TableLM(), TableLM(1)
    for prompt in trace.prompts:
        for j, token in enumerate(prompt.output):
            context = [*prompt.token_ids, *prompt.output[:j]]
            p, q = (lm.score([Row(0, context, 1)])[0].double() for lm in (target, draft))
            for scores in (p, q):
                scores[3] += 0.5
            p, q = ((scores / 0.9).softmax(0) for scores in (p, q))
            g = noise.gumbel(prompt.params.seed, prompt.params.index, len(context), len(LETTERS))
            assert int((p.log() + g).argmax()) == token, "the text is gumbel's"
            found = trace.drafts["model"]
            assert trace.log_p[flat] == pytest.approx(float(p[token].log()), abs=1e-5)
            assert found.log_q[flat] == pytest.approx(float(q[token].log()), abs=1e-5)
            assert found.is_argmax[flat] == (int(q.argmax()) == token)
            assert found.rank[flat] == int((q > q[token]).sum())
            assert found.is_gumbel[flat] == (int((q.log() + g).argmax()) == token)
            flat += 1
    assert flat == trace.num_output_tokens


def test_scoring_in_pieces_changes_nothing(trace, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trace.drafts["model"]
    for limit, value in (("_MAX_LOGITS", 3 * len(LETTERS)), ("MAX_FED", 5), ("_MAX_ROWS", 1)):
        monkeypatch.setattr(tracing, limit, value)
        lm = TableLM(1)
        pieces = trace_draft(trace, model_drafter(lm), 4)
        for name in ("log_q", "is_argmax", "is_gumbel", "rank", "confidence"):
            np.testing.assert_allclose(getattr(pieces, name), getattr(whole, name), atol=1e-5)


def test_a_small_cache_takes_prompts_in_turns(trace) -> None:
    class Counting(TableLM):
        num_blocks, held = 3, frozenset()

        def score(self, rows):
            self.held = self.held | {row.handle for row in rows}
            assert sum(-(-row.num_tokens // self.block_size) for row in rows) <= self.num_blocks
            return super().score(rows)

        def release(self, handle) -> None:
            self.held = self.held - {handle}

    lm = Counting(1)
    found = trace_draft(trace, model_drafter(lm), 4)
    np.testing.assert_array_equal(stand_in(found).is_argmax, trace.drafts["model"].is_argmax)
    assert not lm.held, "every sequence is released"


def test_where_the_draft_cannot_read_nothing_is_accepted(trace) -> None:
    lm = TableLM(1)
    lm.max_context = 12
    found = trace_draft(trace, model_drafter(lm), 4)
    first = 0
    for prompt in trace.prompts:
        readable = max(0, 12 - len(prompt.token_ids) + 1)
        beyond = stand_in(found).log_q[first + readable : first + len(prompt.output)]
        assert np.isneginf(beyond).all()
        assert (not_none(stand_in(found).rank)[first + readable : first + len(prompt.output)] == RANK_BEYOND).all()
        first += len(prompt.output)


def test_a_file_gives_the_trace_back(trace, tmp_path: Path) -> None:
    path = tmp_path / "text.trace"
    trace.save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["text.trace"]
    again = load(path)
    assert again.prompts == trace.prompts
    assert (again.target, again.num_tokens, again.eos_token_ids) == ("table", len(LETTERS), (0,))
    assert isinstance(again.drafts["model"], ModelTrace)
    assert isinstance(again.drafts["ngram"], GuessTrace)
    np.testing.assert_array_equal(again.ranks("model"), trace.ranks("model"))
    for name in ("model", "ngram"):
        for rule in ("rejection", "block"):
            want, got = (replay(one, name, rule, 4) for one in (trace, again))
            assert [expected_counts(one) for one in got] == [expected_counts(one) for one in want]


def test_a_file_of_an_earlier_version_predicts_chains_and_not_trees(trace, tmp_path: Path) -> None:
    path = tmp_path / "text.trace"
    replace(trace, drafts={"model": replace(trace.drafts["model"], rank=None, confidence=None)}).save(path)
    again = load(path)
    assert [expected_counts(one) for one in replay(again, "model")] == [
        expected_counts(one) for one in replay(trace, "model")
    ]
    with pytest.raises(UsageError, match="an earlier version wrote it, and it predicts chains but not trees"):
        again.ranks("model")


def test_a_draft_without_a_distribution_has_no_ranks(trace) -> None:
    with pytest.raises(UsageError, match="`ngram` has no distribution, so a trace cannot predict its trees"):
        trace.ranks("ngram")


def test_ranks_follow_the_order_in_which_trees_branch() -> None:
    """Ties, banned tokens and the token that leads its ties."""
    scores = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-torch.inf, 1.0, 3.0, 1.0]])
    q = Distribution(scores, [2, 0, 2], np.array([True] * 3), None)
    order = [[token for token, _ in best] for best in likely_children(q, [4] * 3)]
    for token in range(4):
        found = ranks(q, torch.tensor([token] * 3), 64).tolist()
        assert found == [one.index(token) if token in one else 64 for one in order]
    assert ranks(q, torch.tensor([3, 3, 3]), 2).tolist() == [2, 2, 2]


def test_no_vocabulary_wide_array_is_kept(trace) -> None:
    arrays = trace._arrays()
    assert sum(array.nbytes for array in arrays.values()) < 100 * trace.num_output_tokens


def test_a_trace_stands_only_for_its_own_workload(trace, engine) -> None:
    trace.check(engine.tokenizer, requests(engine))
    with pytest.raises(UsageError, match=r"temperature `0\.9`, not `0\.5`"):
        trace.check(engine.tokenizer, requests(engine, temperature=0.5))
    with pytest.raises(UsageError, match="`4` prompts, the workload `3`"):
        trace.check(engine.tokenizer, requests(engine)[:3])
    other = requests(engine)
    other[2].token_ids[0] = 2
    with pytest.raises(UsageError, match="prompt `3`"):
        trace.check(engine.tokenizer, other)
    tokenizer = LetterTokenizer()
    tokenizer.num_tokens = 50
    with pytest.raises(UsageError, match="another tokenizer"):
        trace.check(tokenizer, requests(engine))


def test_files_that_are_no_trace_are_refused(trace, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(UsageError, match="cannot be read"):
        load(path)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(UsageError, match="cannot be read"):
        load(path)
    save_file({"x": np.zeros(2)}, path)
    with pytest.raises(UsageError, match="not a trace of specdec"):
        load(path)
    save_file({"x": np.zeros(2)}, path, metadata={"specdec.trace": '{"format": "specdec.trace/9"}'})
    with pytest.raises(UsageError, match=r"specdec\.trace/9"):
        load(path)
    save_file({"x": np.zeros(2)}, path, metadata={"specdec.trace": '{"format": "specdec.trace/1"}'})
    with pytest.raises(UsageError, match=r"is `specdec\.trace/1`, this version reads `specdec\.trace/2`"):
        load(path)
    save_file({"x": np.zeros(2)}, path, metadata={"specdec.trace": '{"format": "specdec.trace/2"}'})
    with pytest.raises(UsageError, match="damaged"):
        load(path)
    with pytest.raises(RunError, match="cannot be written"):
        trace.save(tmp_path / "nowhere" / "file")


def test_greedy_traces_need_no_probabilities(engine) -> None:
    trace = trace_target(engine, requests(engine, temperature=0.0))
    assert not trace.log_p.any()
    found = trace_draft(trace, model_drafter(TableLM(1)), 4)
    np.testing.assert_array_equal(np.exp(stand_in(found).log_q), stand_in(found).is_argmax)
    trace.drafts["model"] = found
    lengths = {
        rule: replay(trace, "model", rule, 3)[2].acceptance_length().median for rule in ("greedy", "block", "gumbel")
    }
    assert len(set(lengths.values())) == 1


def test_a_guess_is_asked_for_every_k(engine) -> None:
    trace = trace_target(engine, requests(engine))
    trace.drafts["ngram"] = trace_draft(trace, engine.drafter, 2)
    with pytest.raises(UsageError, match="at most `2` tokens, not `3`"):
        replay(trace, "ngram", k_max=3)


def checkpoint(folder, seed):
    """A folder whose last part says little."""
    return str(make_tiny("llama", folder / "checkpoint-500", seed, num_hidden_layers=1))


def loaded(target, draft, draft_dtype: str = "auto"):
    lm, small = load_lm(target), load_lm(draft, dtype=draft_dtype)
    drafter = create("model", {"model": draft})
    drafter.load(Resources(lambda name: small, None, VOCAB))
    return Engine(lm, drafter, None, EngineOptions(num_speculative_tokens=2))


def wanted():
    params = SamplingParams(max_new_tokens=4)
    return [Request(PromptRow(i, ""), [i + 1, 5, 6], replace(params, index=i)) for i in range(3)]


def test_a_trace_serves_its_own_checkpoints_wherever_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.trace"
    target, draft, other = (checkpoint(tmp_path / name, seed) for seed, name in enumerate(("a", "b", "c")))
    first = obtain_trace(loaded(target, draft), wanted(), "draft", 2, path)
    assert not_none(first.origin).weights != stand_in(first.drafts["draft"]).origin.weights
    moved = str(make_tiny("llama", tmp_path / "elsewhere", 0, num_hidden_layers=1))
    again = obtain_trace(loaded(moved, draft), wanted(), "draft", 2, path)
    assert again.origin == first.origin
    assert not again.notices
    with pytest.raises(UsageError, match=r"is of target `.*a/checkpoint-500`, not `.*c/checkpoint-500`"):
        obtain_trace(loaded(other, draft), wanted(), "draft", 2, path)
    traced = []
    monkeypatch.setattr(traced_room, "trace_draft", lambda *a, f=traced_room.trace_draft: traced.append(1) or f(*a))
    obtain_trace(loaded(target, draft), wanted(), "draft", 2, path)
    assert not traced


@pytest.mark.parametrize("change", ["weights", "dtype"])
def test_a_draft_that_changed_under_its_name_is_traced_again(tmp_path: Path, change: str) -> None:
    path = tmp_path / "text.trace"
    target, draft = checkpoint(tmp_path / "a", 0), checkpoint(tmp_path / "b", 1)
    first = obtain_trace(loaded(target, draft), wanted(), "draft", 2, path)
    if change == "weights":
        checkpoint(tmp_path / "b", 0)
    again = obtain_trace(loaded(target, draft, "bfloat16" if change == "dtype" else "auto"), wanted(), "draft", 2, path)
    assert any("traced again" in one for one in again.notices)
    assert stand_in(again.drafts["draft"]).origin != stand_in(first.drafts["draft"]).origin
    if change == "weights":
        assert stand_in(again.drafts["draft"]).is_argmax.all(), "the draft is the target now"
        assert not stand_in(first.drafts["draft"]).is_argmax.all()


def test_what_may_differ_between_machines_is_said_and_the_rest_refused(trace) -> None:
    was = Origin("/server/checkpoint-500", None, "bfloat16", "none", "abc")
    trace.origin = was
    trace.check_target(was)
    trace.check_target(replace(was, name="here", revision="main"))
    assert not trace.notices
    trace.check_target(replace(was, dtype="float32"))
    assert "the target in bfloat16, and here it runs in float32" in trace.notices[0]
    for change, said in (
        ({"weights": "abd"}, "the weights differ"),
        ({"weights": None}, "the weights differ"),
        ({"quantize": "int8"}, "quantize `none`, not `int8`"),
    ):
        with pytest.raises(UsageError, match=said):
            trace.check_target(replace(was, **change))
