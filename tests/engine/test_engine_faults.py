"""Faults of cache, step and seeds, planted one at a time: each must be seen by a check that a correct engine passes."""

import pytest
from tiny_engine import PROMPTS, alone, decode, tiny_lm, tokens

from specdec_cli.engine import verify as verify_module
from specdec_cli.engine.verify import Verdict
from specdec_cli.lm.cache.contexts import Contexts
from specdec_cli.lm.cache.layout import Layouts
from specdec_cli.lm.door import Row
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.sampling import noise
from specdec_cli.sampling.params import SamplingParams

GREEDY = SamplingParams(max_new_tokens=12)
MANY = 1_000


def plain(target) -> list[list[int]]:
    return tokens(decode(target, None, 0, params=GREEDY))


def cuts_back_too_little(score, num_kept):
    """A cache that keeps up to `num_kept` of the tokens that a step rejected."""
    held: dict[tuple[int, int], tuple[list[int], int]] = {}

    def patched(self, rows):
        faulty = []
        for row in rows:
            context, num_new = row.as_chain(), max(row.num_logits, 1)
            cached, num_real = held.get((id(self), row.handle), ([], 0))
            num_rejected = num_real - (len(context) - num_new)
            if cached and num_rejected >= 0:
                cached = cached[: len(cached) - num_rejected + min(num_kept, num_rejected)] + context[-num_new:]
            else:
                cached = context
            held[id(self), row.handle] = cached, len(context)
            faulty.append(Row(row.handle, cached, row.num_logits))
        return score(self, faulty)

    return patched


@pytest.mark.parametrize("num_kept", [1, MANY], ids=["one token too long", "no cut back at all"])
@pytest.mark.parametrize("name", ["stranger", "ngram"])
def test_a_cache_that_keeps_rejected_tokens(
    target, draft_of, monkeypatch: pytest.MonkeyPatch, name: str, num_kept
) -> None:
    expected = plain(target)
    prompts, params = PROMPTS[:3], SamplingParams(max_new_tokens=10)
    short = [text[:10] for text in expected[:3]]
    assert tokens(decode(target, draft_of(name), 3, prompts, params)) == short
    monkeypatch.setattr(TransformersLM, "score", cuts_back_too_little(TransformersLM.score, num_kept))
    assert tokens(decode(target, None, 0, prompts, params)) == short, "plain decoding hides the fault"
    assert tokens(decode(target, draft_of(name), 3, prompts, params)) != short


def test_a_rejected_tokens_keys_left_in_the_cache(target, stranger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The own token's key is not written over that of the rejected token in its place."""
    expected, stale = plain(target), set()
    cut, pieces = Contexts._cut, Layouts._pieces

    def noting(self, held, keep):
        (stale.add if 0 < keep < len(held.tokens) else stale.discard)(id(held))
        return cut(self, held, keep)

    def skipping(self, feed, start):
        for i, (first, stop, slot) in enumerate(pieces(self, feed, start)):
            skip = int(i == 0 and id(feed.sequence) in stale)
            yield first + skip, stop, slot + skip

    monkeypatch.setattr(Contexts, "_cut", noting)
    monkeypatch.setattr(Layouts, "_pieces", skipping)
    assert plain(target) == expected, "plain decoding hides the fault"
    assert tokens(decode(target, stranger, 4, params=GREEDY)) != expected


def test_blocks_that_are_not_given_back(folder, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = tiny_lm(folder, "llama", seed=1)
    monkeypatch.setattr(TransformersLM, "release", lambda self, handle: None)
    with pytest.raises(AssertionError, match="an idle engine holds blocks"):
        decode(lm, None, 0, params=GREEDY)


def test_off_by_one_bonus(target, itself, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(target)

    def greedy(drafted, chosen, start):
        verdict = correct(drafted, chosen, start)
        if drafted and len(verdict.path) == len(drafted):
            return Verdict(verdict.path, chosen[start + len(verdict.path) - 1])
        return verdict

    correct = verify_module._walk
    monkeypatch.setattr(verify_module, "_walk", greedy)
    assert plain(target) == expected
    assert tokens(decode(target, itself, 3, params=GREEDY)) != expected


@pytest.mark.parametrize("mode", ["rejection", "block", "exact-match", "gumbel"])
def test_one_seed_for_all_rows(target, stranger, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    params = SamplingParams(max_new_tokens=10, temperature=1.2)

    def together() -> list[list[int]]:
        return tokens(decode(target, stranger, 3, params=params, verify=mode))

    def one_by_one() -> list[list[int]]:
        return [
            tokens(decode(target, stranger, 3, [prompt], [alone(params, i)], verify=mode))[0]
            for i, prompt in enumerate(PROMPTS)
        ]

    assert together() == one_by_one()
    for name in ("uniforms_many", "gumbel_many"):
        many = getattr(noise, name)
        monkeypatch.setattr(noise, name, lambda s, i, *rest, many=many: many([s[0]] * len(s), [i[0]] * len(i), *rest))
    assert together() != one_by_one()
