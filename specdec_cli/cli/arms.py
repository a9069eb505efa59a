"""The arms of a measuring command: our engine's, loaded here and taking turns, or another engine's, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_cli.cli.honoured import ENGINE, other_engine, refuse_without_effect
from specdec_cli.cli.measurement_options import check_batch, chosen_prompts
from specdec_cli.cli.output import machine_of
from specdec_cli.cli.place import Arms
from specdec_cli.cli.screen import progress, start_torch
from specdec_cli.engine.promise import Promise
from specdec_cli.measure.workload.turns import every_turn, lost_turns
from specdec_cli.sampling.params import SamplingParams

if TYPE_CHECKING:
    import typer

    from specdec_cli.cli.measurement_options import MeasurementOptions
    from specdec_cli.cli.shared import Shared
    from specdec_cli.engine.arms import Arm
    from specdec_cli.engine.engine import Engine
    from specdec_cli.lm.door import LM
    from specdec_cli.measure.bench.compare import Contender
    from specdec_cli.measure.workload.workload import Workload
    from specdec_cli.recipe import Recipe, Resolved


def arms_from(
    context: typer.Context,
    drafts: Sequence[Resolved],
    names: Sequence[str],
    options: MeasurementOptions,
    shared: Shared,
    dry_run: bool,
    against: Sequence[str] = (),
    are_several: bool = False,
    k_max: int | None = None,
) -> Arms:
    """The arms of recipes, at the place that they name.

    Args:
        context: the command line, whose options that have no effect there are refused.
        drafts: the recipe once for each draft.
        names: the drafts', in reports.
        options: the command's own.
        shared: the command's shared options.
        dry_run: whether nothing will be loaded.
        against: other engines to load in this process.
        are_several: as for `OwnArms`.
        k_max: likewise.

    Raises:
        UsageError: there is such an option, or prompts that cannot be read.
    """
    workload, engines = drafts[0].recipe.workload, [other_engine(draft, shared) for draft in drafts]
    others = [engine.without_prefix_caching() for engine in engines if engine is not None]
    if not others:
        prompts = chosen_prompts(workload, options.chat, only_at_hand=dry_run, by=options.by)
        return OwnArms(drafts, names, options, prompts, shared, against, are_several, k_max)
    from specdec_cli.cli.engine_arms import EngineArms

    refuse_without_effect(context, ENGINE, f"--engine {drafts[0].recipe.engine.name}", drafts[0])
    prompts = chosen_prompts(workload, options.chat, only_at_hand=dry_run, by=options.by)
    return EngineArms([other.resolved for other in others], names, options, prompts, shared, engines=others)


@dataclass(slots=True)
class OwnArms(Arms):
    """Arms of our engine around one target, which is loaded here.

    Args:
        are_several: whether there may be several drafts, around one target.
        k_max: room for so many drafted tokens; None takes the recipe's.
        room: settings of speculation that the engines are loaded with in place of the recipe's.
    """

    in_turn = True
    keeps_journal = True

    are_several: bool = False
    k_max: int | None = None
    room: Mapping[str, Any] = field(default_factory=dict)
    engines: list[Engine] = field(init=False, default_factory=list)

    @property
    def engine(self) -> Engine:
        """Engine with the first draft."""
        return self.engines[0]

    @property
    def recipe(self) -> Recipe:
        """The recipe that is measured, sized for its batch; of several drafts, what they have in common."""
        return self._sized(self.resolved.recipe)

    @property
    def promise(self) -> Promise:
        """Promise of the recipe's verification rule."""
        return Promise.of(self.recipe)

    def open(self) -> None:
        """Load the models and tokenize the prompts."""
        from specdec_cli.engine.caveats import slow_forwards
        from specdec_cli.engine.garbage import leave_alone

        with progress(self.screen) as say:
            start_torch(say)
            from specdec_cli.measure.machine.machine import look

            self.load_before = look().load  # before we keep it busy
            self._load(say)
            leave_alone()
        for note in (*slow_forwards(self.engine), self.workload.notice):
            if note:
                self.screen.say(f"note: {note}", "yellow")

    def _load(self, say: Callable[[str], None]) -> None:
        from specdec_cli.engine.build import engines_from_recipes
        from specdec_cli.engine.engine import Engine
        from specdec_cli.measure.bench.against import check_lengths, load_peers
        from specdec_cli.measure.bench.bench import groups_of

        trust = self.shared.trust_remote_code
        recipes = [self._with_room(draft.recipe) for draft in self.drafts]
        if self.are_several:
            self.engines = engines_from_recipes(Engine, recipes, trust_remote_code=trust, progress=say)
        else:
            self.engines = [Engine.from_recipe(recipes[0], trust_remote_code=trust, progress=say)]
        self.workload = self._tokenize()
        check_lengths(self.against, groups_of(self.workload, self.options.batch_size))
        self.peers = load_peers(self.against, self.recipe, self.engine.eos_token_ids, trust, say)

    def arm(self, name: str, k: int | None, draft: int = 0) -> Arm:
        """The engine with a draft at a k."""
        from specdec_cli.engine.arms import EngineArm

        return EngineArm(name, self.engines[draft], k)

    def contenders(self) -> list[Contender]:
        """The drafts, loaded."""
        from specdec_cli.measure.bench.compare import Contender

        return [
            Contender(name, engine.drafters.own_name, engine)
            for name, engine in zip(self.names, self.engines, strict=True)
        ]

    def matching(self) -> list[str]:
        """How drafts with another tokenizer share the target's vocabulary; that of the first is among the notices."""
        from specdec_cli.engine.drafts import matching

        pairs = list(zip(self.names, self.engines, strict=True))[1:]
        return [f"{name}: {message}" for name, engine in pairs for message in matching(engine.drafter)]

    @property
    def target(self) -> LM:
        """The model that decodes."""
        return self.engine.target

    def cut_drafts(self) -> list[str]:
        """Sentences about drafts that go less deep than the recipe asks."""
        from specdec_cli.engine.depth.draft_limit import own_cut_drafts

        return own_cut_drafts(self.engine)

    def notices(self) -> list[str]:
        """Limits of what was measured, and where the recipe was not measured as it was given."""
        from specdec_cli.engine.caveats import caveats
        from specdec_cli.measure.bench.against import unequal_precision

        unequal = unequal_precision(self.against, self.recipe)
        return [*caveats(self.recipe, self.engine), *self._changes(), *([unequal] if unequal else [])]

    def machine(self, outputs: Iterable[Sequence[int]] = ()) -> dict[str, Any]:
        """Device, dtype and decoder of the models."""
        return machine_of(self.engine, outputs)

    def _sized(self, recipe: Recipe) -> Recipe:
        """A recipe with room for the batch, where no arm finds what another left in the cache."""
        changed: dict[str, Any] = {"max_num_seqs": max(recipe.engine.max_num_seqs, self.options.batch_size)}
        if recipe.engine.enable_prefix_caching:
            changed["enable_prefix_caching"] = False
        return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changed)})

    def _with_room(self, recipe: Recipe) -> Recipe:
        """Recipe with room for the largest k and tree."""
        from specdec_cli.engine.synthetic import at_depth

        recipe = self._sized(recipe)
        speculation = recipe.speculation if self.k_max is None else at_depth(recipe.speculation, self.k_max)
        return recipe.model_copy(update={"speculation": speculation.model_copy(update=self.room)})

    def _tokenize(self) -> Workload:
        """The prompts, tokenized; of conversations every turn, with the target's answers before it."""
        from specdec_cli.measure.workload.workload import workload_of

        params = SamplingParams(**self.recipe.sampling.model_dump() | {"logprobs": None})
        requests, num_lost = every_turn(self.engine, self.rows, self.options.chat, params)
        if num_lost:
            self.prompts.notices.append(lost_turns(num_lost))
        made = workload_of(requests, self.recipe.workload.dataset, self.engine.target.max_context)
        check_batch(self.options.batch_size, len(made.requests))
        return made

    def _changes(self) -> Iterator[str]:
        """Sentences about settings that differ from the given recipe."""
        named, measured = self.resolved.recipe.engine, self.recipe.engine
        if named.max_num_seqs != measured.max_num_seqs:
            yield f"max_num_seqs is {measured.max_num_seqs} here, not {named.max_num_seqs}: a batch runs together"
        if named.enable_prefix_caching:
            yield "prefix caching is off here, because the arms decode the same prompts"
