"""Other engines as arms of a benchmark: transformers' `generate`, plain and assisted, and its continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_cli.engine.arms import ArmRun
from specdec_cli.errors import UsageError
from specdec_cli.timing import timing_of

if TYPE_CHECKING:
    from specdec_cli.engine.decoding import Request
    from specdec_cli.lm.peers import Peer
    from specdec_cli.measure.bench.passes import Group
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
        raise UsageError(f"`--against {text}` is not a plain arm", f"some of {', '.join((OURS, *PEERS))}")
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
    """Refuse prompts of one group that ask for different lengths, which transformers does not give them."""
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
    """Another engine in this process; it is not asked to stop within a run.

    Args:
        name: as `--against` has it.
        peer: decodes.
        stop_ids: tokens that end an output.
    """

    name: str
    peer: Peer
    stop_ids: tuple[int, ...]

    @property
    def is_computing(self) -> bool:
        """Whether its model runs on this machine's cores."""
        return self.peer.device.type == "cpu"

    def start(self) -> None:
        """Nothing: the model is loaded."""

    def run(self, requests: Sequence[Request], stopped: Callable[[], bool]) -> ArmRun | None:
        """Decode requests together; None when it should not begin."""
        if stopped():
            return None
        lengths = {request.params.max_new_tokens for request in requests}
        assert len(lengths) == 1, "transformers decodes a group to one length"
        run = self.peer.generate([request.token_ids for request in requests], lengths.pop(), self.stop_ids)
        num_decoded = sum(map(len, run.token_ids)) - run.num_first
        timing = timing_of(0.0, run.first_seconds, run.total_seconds, num_decoded)
        return ArmRun(tuple(map(tuple, run.token_ids)), timing, run.num_first)

    def stop(self) -> None:
        """End what runs between two runs."""
        self.peer.close()
