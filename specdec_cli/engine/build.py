"""Engines from recipes or from model names: load, compare tokenizers, share out the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from specdec_cli import drafters
from specdec_cli.drafters.contract import Drafter, Resources
from specdec_cli.engine.caches import hold_beside, share_out
from specdec_cli.engine.drafts import check_draft_numbers, check_drafters, draft_model, draft_weights, read_draft
from specdec_cli.engine.loading import LoadProgress, LoadSettings, ModelSettings, load_parameters, model_settings
from specdec_cli.engine.options import EngineOptions
from specdec_cli.engine.synthetic import synthetic_rates
from specdec_cli.errors import UsageError
from specdec_cli.lm.cache.budget import DraftCache
from specdec_cli.lm.cache.cache_plan import KVCacheBytes
from specdec_cli.lm.load import load_model
from specdec_cli.lm.machine.threads import allot_threads
from specdec_cli.lm.model_tokenizer import tokenizer_of
from specdec_cli.lm.plan import ModelPlan
from specdec_cli.lm.reduced_lm import over_all_tokens
from specdec_cli.lm.transformers_lm import TransformersLM
from specdec_cli.text.chat_template import chat_tokenizer
from specdec_cli.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specdec_cli.engine.engine import Engine
    from specdec_cli.lm.door import LM
    from specdec_cli.recipe.schema import EngineSection, Recipe

EngineT = TypeVar("EngineT", bound="Engine")

_TRIED_TOKENS = 512  # room for trying a model that is loaded; `share_out` plans its cache


def load_engines(
    engine_class: type[EngineT],
    target: str,
    drafts: Sequence[str | Mapping[str, Any] | None],
    *,
    options: EngineOptions | None = None,
    settings: LoadSettings | None = None,
    draft_models: Sequence[ModelSettings] | None = None,
) -> list[EngineT]:
    """Load a target once and an engine around it for every draft; only one of them may have work at a time.

    Args:
        engine_class: the class of the engines that are made.
        target: hub id, local folder or built-in name.
        drafts: each as `Engine.load` takes it.
        options: how the engines speculate and batch.
        settings: how models are loaded.
        draft_models: how each draft is loaded, where that differs from `settings.draft`.

    Raises:
        UsageError: an unknown method or option, or a draft that does not fit.
        RunError: a model that does not load.
    """
    settings = settings or LoadSettings()
    options = options or EngineOptions()
    own = [replace(settings, draft=model) for model in draft_models] if draft_models else [settings] * len(drafts)
    say = settings.progress or (lambda _: None)
    its_plan = _target_plan(target, settings)
    plans = [read_draft(_draft_fields(draft), its_plan, its) for draft, its in zip(drafts, own, strict=True)]
    check_drafters(its_plan, [plan.drafter() for plan in plans], settings.max_model_len)
    say(f"loading tokenizer of {target}")
    tokenizer = chat_tokenizer(tokenizer_of(its_plan), settings.chat_template, settings.chat_variables)
    plans = [plan.by_tokenizer(tokenizer, target) for plan in plans]
    say(f"loading target {target}")
    allot_threads()
    lm = _load(its_plan, settings, options)
    loaders = [_DraftLoader(lm, tokenizer, options, plan.load_settings, plan.model) for plan in plans]
    loaded = [loader.load(plan.drafter()) for loader, plan in zip(loaders, plans, strict=True)]
    share_out(lm, [model for loader in loaders for model in loader.models], options, settings.kv_cache_bytes)
    # Of several engines, one that decodes without a draft has nothing to shape.
    plain = replace(options, tree=None) if len(plans) > 1 else options
    return [
        engine_class(
            *(
                lm,
                drafter,
                tokenizer,
                plain if plan.method == "none" else options,
                lm.eos_token_ids,
                loader.others(plan.method),
            ),
            generation=lm.generation,
        )
        for drafter, plan, loader in zip(loaded, plans, loaders, strict=True)
    ]


@dataclass(slots=True)
class _DraftLoader:
    """Loads drafters for a target that is loaded.

    Args:
        target: the loaded target.
        tokenizer: the target's.
        options: how the engine will speculate and batch.
        settings: how models are loaded.
        model: the plan of the draft, if it is a language model.
        models: the draft models and draft heads that were loaded, whose caches are still to be planned.
    """

    target: LM
    tokenizer: Tokenizer
    options: EngineOptions
    settings: LoadSettings
    model: ModelPlan | None = None
    models: list[DraftCache] = field(default_factory=list)

    def load(self, drafter: Drafter) -> Drafter:
        """Make a drafter ready.

        Raises:
            UsageError: a draft of another vocabulary, or hidden states that the target has not.
            RunError: a model that does not load.
        """
        num_tokens = min(self.tokenizer.num_tokens, self.target.vocab_size)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        if drafter.taps:
            self.target.tap(drafter.taps)
        drafter.load(
            Resources(
                self._load_model,
                encode,
                num_tokens,
                self.target,
                self.settings.draft.revision,
                plan_cache=self._plan,
                trust_remote_code=self.settings.trust_remote_code,
                tokenizer=self.tokenizer,
                load_tokenizer=lambda name: Tokenizer(tokenizer_of(draft_model(name, self.settings))),
            )
        )
        return drafter

    def others(self, own: str) -> dict[str, Drafter]:
        """The drafters beside an engine's own, by name; predictions come with the requests."""
        per_request = {"prediction": {"per_request": True}}
        return {
            name: self.load(drafters.create(name, per_request.get(name, {})))
            for name in self.settings.others
            if name != own
        }

    def _plan(self, cache: DraftCache) -> None:
        """Plan a cache, in the place of that of the model behind it."""
        self.models = [model for model in self.models if model is not getattr(cache, "own", None)] + [cache]

    def _load_model(self, name: str) -> LM:
        say = self.settings.progress or (lambda _: None)
        say(f"loading draft {name}")
        own = self.model
        plan = own if own is not None and own.name == name else draft_model(name, self.settings)
        check_draft_numbers(plan)
        with draft_weights():
            lm = _load(plan, self.settings, self.options)
        self.models.append(lm)
        kept = plan.drafted_tokens
        return lm if kept is None else over_all_tokens(lm, kept, Tokenizer(tokenizer_of(plan)).num_tokens)


def another_drafter(
    engine: Engine, fields: Mapping[str, Any], settings: LoadSettings | None = None, say: LoadProgress | None = None
) -> Drafter:
    """Load a further drafter for an engine that exists; its KV cache takes none of the engine's.

    Raises:
        UsageError: an unknown method or option, a draft that does not fit, or an engine without a tokenizer.
        RunError: a model that does not load.
    """
    settings = replace(settings or LoadSettings(), progress=say)
    if engine.tokenizer is None:
        raise UsageError("the engine has no tokenizer, which a further draft needs", "give the engine one")
    target = _target_plan(engine.target.name, settings)
    plan = read_draft(fields, target, settings).by_tokenizer(engine.tokenizer, target.name)
    loader = _DraftLoader(engine.target, engine.tokenizer, engine.options, plan.load_settings, plan.model)
    drafter = loader.load(plan.drafter())
    for lm in loader.models:
        hold_beside(lm, engine.target.max_context, engine.options)
    return drafter


def engines_from_recipes(
    engine_class: type[EngineT],
    recipes: Sequence[Recipe],
    *,
    trust_remote_code: bool = False,
    others: tuple[str, ...] = (),
    progress: LoadProgress | None = None,
) -> list[EngineT]:
    """Load the engines of recipes that differ in their draft alone, around one target; `others` as in LoadSettings."""
    recipe = recipes[0]
    return load_engines(
        engine_class,
        recipe.target.model,
        [each.draft_fields() for each in recipes],
        draft_models=[model_settings(each.draft) for each in recipes],
        options=engine_options(recipe),
        settings=LoadSettings(
            target=model_settings(recipe.target),
            max_model_len=recipe.engine.max_model_len,
            block_size=recipe.engine.kv_block_size,
            kv_cache_bytes=given_cache_bytes(recipe.engine),
            decoder=recipe.engine.decoder,
            generation_config=recipe.target.generation_config,
            chat_template=recipe.target.chat_template,
            chat_variables=recipe.target.default_chat_template_kwargs,
            check=recipe.engine.check_at_load,
            trust_remote_code=trust_remote_code,
            others=others,
            progress=progress,
        ),
    )


def check_draft_arguments(draft: str | Mapping[str, Any] | None, changes: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of `Engine.load` that say how a draft is loaded which loads no model.

    Raises:
        UsageError: there is one with another value than its default.
    """
    fields = _draft_fields(draft)
    if "model" in fields or not isinstance(fields.get("method"), str):
        return
    for parameter in load_parameters():
        value = changes.get(parameter.name, parameter.field.default)
        if parameter.is_draft and value != parameter.field.default:
            message = f"{parameter.name} has no meaning for the draft `{drafters.to_spec(fields)}`"
            raise UsageError(f"{message}, which loads no model", "leave it out")


def _draft_fields(draft: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if draft is None:
        return {"method": "none"}
    return drafters.parse_spec(draft) if isinstance(draft, str) else dict(draft)


def _target_plan(name: str, settings: LoadSettings) -> ModelPlan:
    its = settings.target
    return ModelPlan(name, its, settings.decoder, settings.generation_config, settings.trust_remote_code)


def _load(plan: ModelPlan, settings: LoadSettings, options: EngineOptions) -> TransformersLM:
    return load_model(
        plan,
        check=settings.check,
        progress=getattr(settings.progress, "count_bytes", None),
        max_num_seqs=options.max_num_seqs,
        block_size=settings.block_size,
        extra_tokens=options.most_nodes,
        max_model_len=settings.max_model_len,
        num_blocks=-(-_TRIED_TOKENS // settings.block_size),
    )


def engine_options(recipe: Recipe) -> EngineOptions:
    """The engine's options that a recipe names."""
    speculation = recipe.speculation
    return EngineOptions(
        num_speculative_tokens=speculation.num_speculative_tokens,
        verify=speculation.verify,
        synthetic_acceptance_rates=synthetic_rates(speculation),
        depth_policy=speculation.depth_policy,
        tree=speculation.tree,
        p_min=speculation.least_confidence,
        k_by_batch=speculation.k_by_batch or (),
        k_by_context=speculation.k_by_context or (),
        disable_by_batch_size=speculation.disable_by_batch_size,
        max_num_seqs=recipe.engine.max_num_seqs,
        max_num_batched_tokens=recipe.engine.max_num_batched_tokens,
        prefix_caching=bool(recipe.engine.enable_prefix_caching),
    )


def given_cache_bytes(engine: EngineSection) -> KVCacheBytes:
    """The recipe's KV cache memory. A share can only be computed once the weights are loaded."""
    return engine.kv_cache_bytes() if engine.memory_share() is None else engine.kv_cache_bytes
