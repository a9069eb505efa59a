"""Other engines as arms of a benchmark: transformers' `generate`, plain and assisted, and its continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.engine.outputs import Timing
from specdec_cli.errors import UsageError

if TYPE_CHECKING:
    from specdec_cli.lm.peers import Peer
    from specdec_cli.measure.bench.passes import Group, Pass
    from specdec_cli.recipe.schema import Recipe

OURS = "none"
PEERS = ("transformers", "transformers-assisted", "transformers-cb")
_NEUTRAL = {
    "temperature": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "stop": (),
    "min_tokens": 0,
}


def parse_against(text: str) -> tuple[str, ...]:
    """The other engines of `--against`; `none` is our own without a draft, which is always there.

    Raises:
        UsageError: an unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = next((name for name in names if name != OURS and name not in PEERS), None)
    if wrong is not None or not names:
        raise UsageError(f"`--against {text}` names no plain arm", f"some of {', '.join((OURS, *PEERS))}")
    return tuple(name for name in PEERS if name in names)


def check_peers(names: Sequence[str], recipe: Recipe, batch_size: int) -> None:
    """Refuse what the other engines would decode differently, before anything is loaded.

    Raises:
        UsageError: sampling, a rule they do not share, a batch or a draft that the assistant cannot take.
    """
    if not names:
        return
    if "dummy" in (recipe.target.load_format, recipe.draft.load_format) or recipe.speculation.is_synthetic:
        raise UsageError(
            f"`--against {','.join(names)}` reads weights and verifies: it fits neither random weights nor synthetic "
            "acceptance",
            "leave --against out",
        )
    other = next((key for key, neutral in _NEUTRAL.items() if getattr(recipe.sampling, key) != neutral), None)
    if other is not None:
        raise UsageError(
            f"`--against {','.join(names)}` decodes greedily and without `sampling.{other}`",
            f"leave {other} at its default, or leave --against out",
        )
    if "transformers-assisted" in names and batch_size > 1:
        raise UsageError(
            f"transformers' assisted generation takes one prompt at a time, not `{batch_size}`",
            "use --batch-size 1, or leave transformers-assisted out of --against",
        )
    if "transformers-assisted" in names and recipe.draft.model is None:
        raise UsageError(
            f"transformers-assisted needs a draft model, and the draft is `{recipe.draft.method}`",
            "name a model with --draft, or leave transformers-assisted out of --against",
        )


def unequal_precision(names: Sequence[str], recipe: Recipe) -> str | None:
    """A sentence where our weights are quantized and the other engines' are not, or None."""
    packed = {"target": recipe.target.quantize, "draft": recipe.draft.quantize}
    if "transformers-assisted" not in names or recipe.draft.model is None:
        del packed["draft"]
    ours = [f"{role} in {kind}" for role, kind in packed.items() if kind != "none"]
    if not names or not ours:
        return None
    return (
        f"not at equal precision: specdec runs the {' and the '.join(ours)}, {' and '.join(names)} unquantized, so the "
        "speed-up over them is of the weights too, and tokens may differ"
    )


def check_lengths(names: Sequence[str], groups: Sequence[Group]) -> None:
    """Refuse prompts of one group that ask for different lengths, which transformers does not give them.

    Raises:
        UsageError: there are such.
    """
    if names and any(len({request.params.max_new_tokens for request in group.requests}) > 1 for group in groups):
        raise UsageError(
            "transformers decodes a batch to one length, and prompts of one batch ask for several",
            "use --batch-size 1, or leave `max_new_tokens` out of the prompts' rows",
        )


def load_peers(
    names: Sequence[str],
    recipe: Recipe,
    stop_ids: Sequence[int],
    trust_remote_code: bool,
    progress: Callable[[str], None],
) -> list[PeerArm]:
    """Load the named engines with the recipe's models.

    Raises:
        RunError: a model that does not load.
    """
    from specdec_cli.lm.peers import load_peer

    ends = tuple(recipe.sampling.stop_token_ids) + (() if recipe.sampling.ignore_eos else tuple(stop_ids))
    arms = []
    for name in names:
        progress(f"loading {recipe.target.model} for {name}")
        is_assisted = name == "transformers-assisted"
        peer = load_peer(
            recipe.target.model,
            recipe.draft.model if is_assisted else None,
            revision=recipe.target.revision,
            dtype=recipe.target.dtype,
            device=recipe.target.device,
            assistant_revision=recipe.draft.revision,
            assistant_dtype=recipe.draft.dtype,
            assistant_device=recipe.draft.device,
            num_assistant_tokens=recipe.speculation.num_speculative_tokens,
            trust_remote_code=trust_remote_code,
            is_continuous=name == "transformers-cb",
        )
        arms.append(PeerArm(name, peer, ends))
    return arms


@dataclass(frozen=True, slots=True)
class PeerArm:
    """Another engine; it is not asked to stop within a group.

    Args:
        name: as `--against` has it.
        peer: decodes.
        stop_ids: tokens that end an output.
    """

    name: str
    peer: Peer
    stop_ids: tuple[int, ...]

    def decode(self, group: Group, repeat: int, stopped: Callable[[], bool]) -> Pass | None:
        """Decode a group; None when it should not begin."""
        from specdec_cli.measure.bench.passes import Pass

        if stopped():
            return None
        lengths = {request.params.max_new_tokens for request in group.requests}
        assert len(lengths) == 1, "transformers decodes a group to one length"
        run = self.peer.generate([request.token_ids for request in group.requests], lengths.pop(), self.stop_ids)
        num = sum(map(len, run.token_ids))
        decode = run.total_seconds - run.first_seconds
        rate = (num - run.num_first) / decode if num > run.num_first and decode > 0 else None
        timing = Timing(run.first_seconds, decode, run.total_seconds, rate)
        return Pass(group, repeat, tuple(map(tuple, run.token_ids)), timing, run.num_first)

    def close(self) -> None:
        """End what runs between two groups."""
        self.peer.close()
