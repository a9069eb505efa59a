import json
import threading

import psutil
import pytest
from hostile_grammars import AMBIGUOUS, PATTERNS, intersection
from tiny_grammar import byte_tokenizer
from typed import not_none

from specdec_cli.errors import RunError, Unavailable, UsageError
from specdec_cli.sampling.grammar import GrammarError, MaskBudget, compile_grammar
from specdec_cli.sampling.grammar_sandbox import Cancellation, GrammarCancelledError, GrammarCompiler, GrammarLimits

TOKENIZER = byte_tokenizer()
MANY_PROPERTIES = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})
COMPILER = GrammarCompiler(GrammarLimits(0.3, 2**30))
PATIENT = GrammarCompiler(GrammarLimits(60.0, 24 * 2**20))
ROOMY = GrammarCompiler(GrammarLimits(60.0, 2**29))


@pytest.mark.in_turn(1, every=3)
@pytest.mark.parametrize(
    ("compiler", "kind", "source", "words"),
    [
        (COMPILER, "grammar", intersection(24), "takes more than 0.3 s of processor time"),
        (COMPILER, "grammar", intersection(60), "takes more than"),
        (COMPILER, "json_schema", PATTERNS, "takes more than 0.3 s of processor time"),
        (PATIENT, "grammar", intersection(24), "takes more than 24 MiB of memory"),
        (PATIENT, "choice", "[" * 30_000, "nested too deep"),
        (PATIENT, "json_schema", '{"a":' * 5000 + "1" + "}" * 5000, "recursion limit"),
        (PATIENT, "grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        (PATIENT, "regex", "(" * 5000 + "a" + ")" * 5000, "nested parentheses"),
        (ROOMY, "json_schema", MANY_PROPERTIES, "Too many items"),
        (PATIENT, "json_schema", '{"type": "foo"}', "Invalid type: foo"),
    ],
)
def test_49_15_a_grammar_that_costs_too_much_is_refused(
    compiler: GrammarCompiler, kind: str, source: str, words: str
) -> None:
    with pytest.raises(UsageError, match=f"`{kind}` does not compile: .*{words}"):
        compiler.compile(kind, source, TOKENIZER)
    compiler.compile("regex", "[ab]+", TOKENIZER)  # the next one finds the process in order


def test_49_15_a_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(COMPILER.limits)
    compiler.compile("regex", "a", TOKENIZER)
    sandbox = compiler._sandboxes[TOKENIZER]
    monkeypatch.setattr(sandbox, "_try_out", lambda *_: ("too much memory", None))
    compiler.compile("regex", "a", TOKENIZER)
    with pytest.raises(UsageError, match="memory"):
        compiler.compile("regex", "b", TOKENIZER)


def test_49_15_a_trial_ends_with_its_requester() -> None:
    compiler, cancellation = GrammarCompiler(GrammarLimits(600.0, 2**40)), Cancellation()
    compiler.compile("regex", "a", TOKENIZER)
    process = not_none(compiler._sandboxes[TOKENIZER]._process)
    timer = threading.Timer(0.3, cancellation.cancel)
    timer.start()
    with pytest.raises(GrammarCancelledError):
        compiler.compile("json_schema", PATTERNS, TOKENIZER, cancellation)
    timer.join()
    assert process.wait(60) < 0
    with pytest.raises(GrammarCancelledError):
        compiler.compile("regex", "b", TOKENIZER, cancellation)
    compiler.compile("regex", "c", TOKENIZER)


def test_a_trial_that_gets_no_time_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(GrammarLimits(600.0, 2**40))
    compiler.compile("regex", "a", TOKENIZER)
    monkeypatch.setattr("specdec_cli.sampling.grammar_sandbox._WALL_SECONDS_PER_SECOND", 1e-4)
    with pytest.raises(Unavailable, match="other processes take this machine's time"):
        compiler.compile("json_schema", PATTERNS, TOKENIZER)
    assert len(compiler._sandboxes[TOKENIZER]._verdicts) == 1


def test_49_15_a_process_that_was_killed_is_replaced() -> None:
    compiler = GrammarCompiler(GrammarLimits(10.0, 2**28))
    compiler.compile("regex", "a", TOKENIZER)
    process = compiler._sandboxes[TOKENIZER]._process
    assert process is not None
    process.kill()
    compiler.compile("regex", "b", TOKENIZER)


def test_a_process_that_ends_while_it_starts_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(GrammarLimits(10.0, 2**28))
    monkeypatch.setattr("specdec_cli.sampling.grammar_sandbox._START", "raise SystemExit(3)  # {path}")
    with pytest.raises(RunError, match="the process that tries grammars ended"):
        compiler.compile("regex", "a", TOKENIZER)
    monkeypatch.undo()
    compiler.compile("regex", "a", TOKENIZER)


def test_processes_that_were_ended_leave_no_pipes() -> None:
    compiler = GrammarCompiler(GrammarLimits(0.05, 2**30))
    with pytest.raises(UsageError):
        compiler.compile("grammar", intersection(24), TOKENIZER)
    num_open = psutil.Process().num_fds()
    for num_terms in range(25, 29):
        with pytest.raises(UsageError):
            compiler.compile("grammar", intersection(num_terms), TOKENIZER)
    assert psutil.Process().num_fds() <= num_open


def test_49_15_masks_that_cost_too_much_end_the_output() -> None:
    grammar = compile_grammar("regex", "[ab]*", TOKENIZER, mask_seconds=1.0)
    matcher = grammar.start(TOKENIZER.num_tokens, (0,), (0,))
    letter = TOKENIZER.vocabulary["a"]
    assert matcher.accept([letter]) == 1
    assert matcher.allowed[letter]
    grammar._budget.spend(2.0)
    assert matcher.accept([letter]) == 1
    with pytest.raises(GrammarError, match="its masks take too much processor time"):
        _ = matcher.allowed
    with pytest.raises(GrammarError):
        _ = grammar.start(TOKENIZER.num_tokens, (0,), (0,)).allowed  # all outputs of a request have one budget


def test_49_15_every_mask_adds_to_the_budget() -> None:
    budget = MaskBudget(0.1)
    for _ in range(1000):
        budget.spend(0.004, num_masks=1)
    assert not budget.is_spent
    for _ in range(1000):
        budget.spend(0.006, num_masks=1)
    budget.spend(4.2)
    assert budget.is_spent
    unlimited = MaskBudget()
    unlimited.spend(10.0**9)
    assert not unlimited.is_spent


def test_49_15_an_ambiguous_grammar_runs_out_of_items() -> None:
    matcher = compile_grammar("grammar", AMBIGUOUS, TOKENIZER).start(TOKENIZER.num_tokens, (0,), (0,))
    letters = [TOKENIZER.vocabulary["a"]] * 100
    assert matcher.accept(letters) < len(letters)
    with pytest.raises(GrammarError, match="cannot continue"):
        _ = matcher.allowed


def test_49_15_many_choices_are_one_terminal() -> None:
    """As alternatives of a rule, more than 2,000 were refused."""
    choices = [f"choice number {i}" for i in range(5000)]
    matcher = compile_grammar("choice", json.dumps(choices), TOKENIZER).start(TOKENIZER.num_tokens, (0,), (0,))
    for token in TOKENIZER.encode(choices[4321], False):
        assert matcher.allowed[token]
        matcher.accept([token])
    assert matcher.is_finished
