"""`specdec audit`: is the output what the target alone would have produced?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specdec_cli.cli.audit_requests import AuditedEndpoint, audit_requests
from specdec_cli.cli.endpoint_options import ApiKey, EndpointModel, EndpointTimeout, PlainEndpoint, url_option
from specdec_cli.cli.honoured import HERE, REQUESTS, SERVER, refuse_without_effect
from specdec_cli.cli.measurement_options import DryRun, check_files, whole_numbers
from specdec_cli.cli.options import FILE_OPTIONS, PAIR, WORKLOAD_OPTIONS, Chat
from specdec_cli.cli.output import deliver_with_report, envelope, machine_of, show_plan, write_results
from specdec_cli.cli.prompts import rows_wanted
from specdec_cli.cli.screen import open_screen, progress, say_notices, start_torch
from specdec_cli.cli.shared import Shared, check_template, with_shared_options
from specdec_cli.engine.prompts import PromptRow, PromptSet
from specdec_cli.errors import ExitCode, UsageError
from specdec_cli.files import given_path
from specdec_cli.measure.documents.audit import AuditDocument, audit_body
from specdec_cli.measure.workload.dataset import is_at_hand
from specdec_cli.quantities import counted
from specdec_cli.recipe.present import to_yaml
from specdec_cli.report.audit import print_audit
from specdec_cli.sampling.params import SamplingParams
from specdec_cli.tree_shape import TreeShape
from specdec_cli.verification import AUTO, RULES, lossless_modes

if TYPE_CHECKING:
    from specdec_cli.engine.decoding import Request
    from specdec_cli.engine.engine import Engine
    from specdec_cli.lm.door import LM
    from specdec_cli.measure.audit.audit import AuditedPair, AuditPlan
    from specdec_cli.recipe import Recipe, Resolved

_WHAT = "Checks"
_MODES = ("greedy", "sampled", "gumbel")
_DEFAULT_KS, _DEFAULT_BATCH_SIZES = (1, 2, 4, 8), (1, 2, 4)
_DEFAULT_NUM_TOKENS, _DEFAULT_NUM_PROMPTS = 32, 12
_DEFAULT_DATASET = "builtin:stories"
_LEFT_OUT = [
    "sampling.logprobs",
    *(f"speculation.{key}" for key in ("depth_policy", "p_min", "disable_by_batch_size", "k_by_batch", "k_by_context")),
    *(f"speculation.synthetic_acceptance_{key}" for key in ("length", "rates")),
]
"""Options without a meaning here: every k is checked at every batch size, and lossy modes promise nothing to check."""
_K, _LENGTH = "speculation.num_speculative_tokens", "sampling.max_new_tokens"


def _modes_of(verify: str) -> tuple[str, ...]:
    """The checks that a verification mode has a promise for; `gumbel` compares sampled tokens with plain ones."""
    if verify == AUTO or (RULES[verify].samples and RULES[verify].keeps_tokens):
        return _MODES
    return _MODES[:2] if RULES[verify].samples else _MODES[:1]


_FILES = [option for option in FILE_OPTIONS if option.path in ("files.markdown", "files.junit")]
_FILES[1] = replace(_FILES[1], help="Write all checks as JUnit XML.")


Tools = Annotated[
    Path | None,
    typer.Option(
        "--tools",
        help="Compare the answers to these requests (tool calls, JSON, grammars; one JSON body per line) with and "
        "without the draft, at temperature 0: on our own server, or with --endpoint.",
        metavar="FILE",
        rich_help_panel=_WHAT,
    ),
]


@with_shared_options(
    common=f"{PAIR} mode tools endpoint prompt-file num-prompts k-values time-limit json output",
    without=_LEFT_OUT,
    beside=(*WORKLOAD_OPTIONS, *_FILES),
    defaults={
        "sampling.max_new_tokens": str(_DEFAULT_NUM_TOKENS),
        "workload.dataset": _DEFAULT_DATASET,
        "workload.num_prompts": str(_DEFAULT_NUM_PROMPTS),
    },
)
def audit(
    context: typer.Context,
    mode: Annotated[
        str | None,
        typer.Option(
            help="Modes to check: greedy, sampled, gumbel.",
            metavar="A,B",
            show_default="all that --verify allows",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    k_values: Annotated[
        str | None,
        typer.Option(
            help="Values of k to check; drawn tokens are tested at 1 and at the largest.",
            metavar="K,...",
            show_default="1,2,4,8 and the recipe's k",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            help="Batch sizes to check.",
            metavar="N,...",
            show_default="1,2,4",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    time_limit: Annotated[
        float,
        typer.Option(
            min=0,
            help="Time limit for the checks. Each kind runs at least once.",
            metavar="SECONDS",
            rich_help_panel=_WHAT,
        ),
    ] = 60.0,
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="Check the samplers with a small table model, on chains and trees, without loading a pair.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="With --table: take enough samples to detect a shift of 1 %, whatever the time.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    tools: Tools = None,
    chat: Chat = False,
    dry_run: DryRun = False,
    endpoint: Annotated[
        str | None, url_option("Compare this server's answers with and without its draft, at temperature 0.")
    ] = None,
    plain_endpoint: PlainEndpoint = None,
    endpoint_model: EndpointModel = None,
    endpoint_timeout: EndpointTimeout = None,
    api_key: ApiKey = None,
    *,
    shared: Shared,
) -> ExitCode | None:
    """Check that the output is exactly what the target alone produces. Exits with 3 if it is not.

    Examples:
        # Audit the built-in pair for a minute.
        specdec audit
        # Audit greedy decoding of your models for ten minutes.
        specdec audit -t MODEL -d DRAFT --mode greedy --time-limit 600
        # Compare tool calls and JSON with and without the draft on a running server.
        specdec audit --endpoint http://127.0.0.1:8000 --tools requests.jsonl
    """
    check_template(shared, chat)
    server = AuditedEndpoint(endpoint, plain_endpoint, endpoint_model, endpoint_timeout, api_key, tools, chat)
    if endpoint is not None or tools is not None:
        return _audit_requests(context, server, shared, dry_run)
    refuse_without_effect(context, HERE)
    resolved = shared.resolve()
    options = _AuditOptions(mode, k_values, batch_sizes, time_limit, table, full, chat)
    _check(options, resolved.recipe)
    if table:
        _check_table(options, shared)
    check_files(shared)
    prompts = PromptSet([]) if table else _prompts(resolved.recipe, shared, chat, only_at_hand=dry_run)
    run = _AuditRun(resolved, options, prompts.rows, prompts.notices, shared)
    if dry_run:
        run.rehearse()
    else:
        run.go()
    return None


def _audit_requests(context: typer.Context, server: AuditedEndpoint, shared: Shared, dry_run: bool) -> ExitCode | None:
    """Audit a server, or our own one with a file of requests."""
    is_ours = server.url is None
    refuse_without_effect(context, REQUESTS if is_ours else SERVER, "--tools" if is_ours else "--endpoint")
    shared.loads_models = is_ours
    resolved = shared.resolve()
    of_prompts = next((flag for path, (_, flag) in shared.flags.items() if path.startswith("workload.")), None)
    if server.tools is not None and (of_prompts or server.chat):
        raise UsageError(f"`{of_prompts or '--chat'}` has no effect with `--tools`", "leave one of them out")
    if shared.files:
        raise UsageError("answers of a server are audited into JSON alone", "use --output FILE")
    if is_ours and resolved.recipe.draft.method == "none":
        raise UsageError("there is no draft to audit", "name one with --draft, for example `--draft ngram`")
    prompts = PromptSet([])
    if server.tools is None:
        prompts = _prompts(resolved.recipe, shared, server.chat, only_at_hand=dry_run)
    return audit_requests(resolved, server, prompts, shared, dry_run)


@dataclass(frozen=True, slots=True)
class _AuditOptions:
    """The command's own options."""

    mode: str | None
    k_values: str | None
    batch_sizes: str | None
    time_limit: float
    table: bool
    full: bool
    chat: bool

    def modes(self, verify: str) -> tuple[str, ...]:
        """The modes to check, in the order of MODES.

        Raises:
            UsageError: an unknown mode, or one that the verification mode leaves nothing to check in.
        """
        allowed = _modes_of(verify)
        if self.mode is None:
            return ("sampled",) if self.table else allowed
        modes = [name.strip() for name in self.mode.split(",")]
        wrong = next((name for name in modes if name not in _MODES), None)
        if wrong is not None:
            raise UsageError(f"`--mode {self.mode}` names `{wrong}`", f"some of {', '.join(_MODES)}, with commas")
        unfit = next((name for name in modes if name not in allowed), None)
        if unfit is not None:
            raise UsageError(f"`--mode {unfit}` has nothing to check with `--verify {verify}`", "leave --verify out")
        return tuple(name for name in _MODES if name in modes)


def _check(options: _AuditOptions, recipe: Recipe) -> None:
    """Refuse what contradicts itself before anything is loaded."""
    verify = recipe.speculation.verify
    if verify not in lossless_modes():
        raise UsageError(
            f"`--verify {verify}` is lossy by design: there is no promise to audit",
            f"audit a lossless mode: {', '.join(lossless_modes())}",
        )
    modes = options.modes(verify)
    if options.full and not options.table:
        raise UsageError("`--full` is for the table model", "add --table, or give the pair more time: --time-limit 600")
    if options.table and modes != ("sampled",):
        raise UsageError(
            "`--table` checks samplers, so it works only with `--mode sampled`", "leave --mode or --table out"
        )
    if not options.table and recipe.draft.method == "none":
        raise UsageError("there is no draft to audit", "name one with --draft, for example `--draft ngram`")


def _check_table(options: _AuditOptions, shared: Shared) -> None:
    """Refuse options of a pair where the table model alone is audited.

    Raises:
        UsageError: there is one.
    """
    own = {
        "--k-values": options.k_values,
        "--batch-sizes": options.batch_sizes,
        "--chat": options.chat or None,
    }
    options_of_pair = [name for name, value in own.items() if value is not None]
    fitting = ("speculation.verify", "speculation.tree")
    options_of_pair += [flag for path, (_, flag) in shared.flags.items() if path not in fitting]
    if options_of_pair:
        raise UsageError(f"`{options_of_pair[0]}` has no effect with `--table`", "leave one of them out")


def _prompts(recipe: Recipe, shared: Shared, chat: bool, *, only_at_hand: bool) -> PromptSet:
    """Prompts of the file or data set, or of the built-in stories; none of a data set that would be fetched first."""
    path = "workload.dataset"
    flags = {path: (_DEFAULT_DATASET, "--dataset")} | shared.flags
    if only_at_hand and not is_at_hand(flags[path][0]):
        return PromptSet([])
    return rows_wanted(recipe.workload, flags, chat or None, num_prompts=_DEFAULT_NUM_PROMPTS)


@dataclass(slots=True)
class _AuditRun:
    """One run of the command."""

    resolved: Resolved
    options: _AuditOptions
    rows: Sequence[PromptRow]
    notices: Sequence[str]
    shared: Shared

    @property
    def recipe(self) -> Recipe:
        return self.resolved.recipe

    def rehearse(self) -> None:
        """Show what would be checked; refuse what the run would refuse before it loads."""
        say_notices(self.notices, self.shared.quiet)
        ks, batch_sizes, modes = self._ks(), self._batch_sizes(), self.options.modes(self.recipe.speculation.verify)
        num = len(self.rows) or None
        prompts = counted(num, "prompt") if num else "all prompts"
        what = f"{prompts}, k = {', '.join(map(str, ks))}, batch sizes {', '.join(map(str, batch_sizes))}"
        head = f"# would check {', '.join(modes)}: {'the table model' if self.options.table else what}\n"
        body = {"origins": self.resolved.origins, "num_prompts": num, "batch_sizes": list(batch_sizes)}
        show_plan(self.recipe.as_dict(), body, self.shared, head + to_yaml(self.resolved, origins=True))

    def _batch_sizes(self) -> tuple[int, ...]:
        sizes = self.options.batch_sizes
        return whole_numbers(sizes, "--batch-sizes", 64) if sizes else _DEFAULT_BATCH_SIZES

    def go(self) -> None:
        """Load, check, show, write, judge."""
        screen = open_screen(self.shared.quiet, streams_text=False)
        ks, batch_sizes = self._ks(), self._batch_sizes()
        if self.resolved.built_in_pair and not self.options.table:
            screen.say(f"no target named: auditing the built-in {self.recipe.target.model}")
        with progress(screen) as say:
            start_torch(say)
            from specdec_cli.measure.audit.audit import Audit

            plan = self._plan(ks, batch_sizes)
            pair = None if self.options.table else self._load(plan, say)
            notes = [] if pair is None else self._notes(pair.engine, plan)
            requests = self._requests(pair.engine) if pair is not None else []
            audit = Audit(pair, requests, plan, lambda stage, done, total: say(f"{stage}: {done} of {total}"))
            audit.run()
        audit.notices[:0] = self.notices
        for note in notes:
            screen.say(f"note: {note}", "yellow")
        machine = machine_of(pair.engine) if pair is not None else {}
        document = envelope(AuditDocument, self.recipe.as_dict(), audit_body(audit), **machine)
        deliver_with_report(document, self.shared, lambda page: print_audit(page, document))
        write_results(document, self.shared)
        audit.gate()

    def _notes(self, engine: Engine, plan: AuditPlan) -> list[str]:
        """Notes about the loaded pair."""
        from specdec_cli.engine.caveats import slow_forwards
        from specdec_cli.engine.depth.draft_limit import cut_drafts

        shape = None if plan.tree is None else TreeShape.parse(plan.tree)
        return [*slow_forwards(engine), *cut_drafts(engine.drafter, max(plan.ks), shape)]

    def _ks(self) -> tuple[int, ...]:
        k = self.recipe.speculation.num_speculative_tokens
        is_flag = _K in self.shared.flags
        if self.options.k_values is not None:
            if is_flag:
                raise UsageError("k is given with -k and with --k-values", "give one of them")
            return whole_numbers(self.options.k_values, "--k-values", 64)
        if is_flag and k == 0:
            raise UsageError("`-k 0` decodes without a draft: there is nothing to audit", "give k of at least 1")
        return (k,) if is_flag else tuple(sorted({*_DEFAULT_KS, k} - {0}))

    def _plan(self, ks: tuple[int, ...], batch_sizes: tuple[int, ...]) -> AuditPlan:
        from specdec_cli.measure.audit import toy
        from specdec_cli.measure.audit.audit import DRAWN_MODES, TREE_MODES, AuditPlan

        verify, tree = self.recipe.speculation.verify, self.recipe.speculation.tree
        tree_modes = tuple(mode for mode in TREE_MODES if verify in ("auto", mode))
        if self.options.table and tree is not None and not tree_modes:
            message = f"verification mode `{verify}` judges chains alone, and the tree is `{tree}`"
            raise UsageError(message, "use --verify auto, or leave --tree out")
        return AuditPlan(
            modes=self.options.modes(verify),
            ks=ks,
            batch_sizes=batch_sizes,
            drawn_modes=(verify,) if verify in RULES else DRAWN_MODES,
            tree_modes=tree_modes,
            tree=toy.TREE if self.options.table and tree is None else tree,
            num_speculative_tokens=max(self.recipe.speculation.num_speculative_tokens, 1),
            time_limit_seconds=self.options.time_limit,
            full=self.options.full,
        )

    def _load(self, plan: AuditPlan, say: Callable[[str], None]) -> AuditedPair:
        """The recipe's pair, with room for the largest k and batch of the plan."""
        from specdec_cli.engine.engine import Engine
        from specdec_cli.measure.audit.audit import AuditedPair

        k = max(*plan.ks, plan.num_speculative_tokens)
        num_seqs = max(self.recipe.engine.max_num_seqs, plan.num_seqs)
        recipe = self.recipe.model_copy(
            update={
                "speculation": self.recipe.speculation.model_copy(update={"num_speculative_tokens": k}),
                "engine": self.recipe.engine.model_copy(update={"max_num_seqs": num_seqs}),
            }
        )
        engine = Engine.from_recipe(recipe, trust_remote_code=self.shared.trust_remote_code, progress=say)
        dtype = str(engine.target.dtype).removeprefix("torch.")
        model = self.recipe.draft.model
        draft = str(self.recipe.draft.method) if model is None else model
        if model is not None and given_path(model).is_dir():
            draft = Path(model).name
        draft = self.recipe.draft.behind_first(draft)
        return AuditedPair(engine, draft, dtype, None if dtype == "float32" else self._load_float32)

    def _load_float32(self) -> LM:
        from specdec_cli.lm.load import load_lm

        target = self.recipe.target
        return load_lm(
            target.model,
            revision=target.revision,
            dtype="float32",
            device=target.device,
            trust_remote_code=self.shared.trust_remote_code,
            load_format=target.load_format,
            max_num_seqs=1,
            max_model_len=self.recipe.engine.max_model_len,
            check=self.recipe.engine.check_at_load,
        )

    def _requests(self, engine: Engine) -> list[Request]:
        """Rows as token ids with their sampling parameters; a row's own seed has noise index 0."""
        from specdec_cli.measure.workload.turns import request_of

        common = SamplingParams(**self.recipe.sampling.model_dump() | {"logprobs": None})
        if self.resolved.origins.get(_LENGTH) == "default":
            common = replace(common, max_new_tokens=_DEFAULT_NUM_TOKENS)
        return [
            request_of(row, engine.encode(row.chat() if self.options.chat else row.prompt), common) for row in self.rows
        ]
