"""The report of `doctor`: the machine, its kernels, and a pair's preflight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_cli.quantities import in_millions, sized
from specdec_cli.report.grid import Grid

if TYPE_CHECKING:
    from specdec_cli.lm.facts import ModelFacts
    from specdec_cli.measure.machine.doctor import Diagnosis
    from specdec_cli.measure.machine.machine import Machine
    from specdec_cli.measure.machine.memory_plan import Memory
    from specdec_cli.measure.machine.outlook import Outlook
    from specdec_cli.measure.machine.preflight import Preflight

_NOTHING = "–"


def print_doctor(console: Console, diagnosis: Diagnosis) -> None:
    """Print a diagnosis."""
    console.print(_machine_table(diagnosis.machine))
    console.print(_device_table(diagnosis.machine))
    obstacle = diagnosis.decoder.obstacle
    words = "compiled for this processor" if obstacle is None else f"{obstacle}, so transformers' forward runs instead"
    words += f"; {diagnosis.decoder.remedy}" if diagnosis.decoder.remedy is not None else ""
    console.print(Text(f"our own decoder on the CPU: {words}"), soft_wrap=True)
    for dtype, kernel in diagnosis.linear.items():
        console.print(Text(f"transformers' linear layers in {dtype} on the CPU: {kernel}"), soft_wrap=True)
    _print_invariance(console, diagnosis)
    console.print(Text("bit-for-bit equality is not promised, until tested here, for", style="dim"))
    for sentence in diagnosis.not_claimed:
        console.print(Text(f"  {sentence}", style="dim"), soft_wrap=True)
    if diagnosis.pair is not None:
        console.print()
        _print_pair(console, diagnosis.pair)
    for warning in diagnosis.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    console.print(_verdict(diagnosis), soft_wrap=True)


def _machine_table(machine: Machine) -> Table:
    table = Grid("", "", title="Machine")
    table.show_header = False
    versions = (f"{name} {version or 'not installed'}" for name, version in machine.versions.items())
    extras = (f"{name} {'installed' if there else 'not installed'}" for name, there in machine.extras.items())
    hub = ["offline by the environment" if machine.hub["offline"] else "not asked", *_hub_variables(machine)]
    load = " ".join(f"{minutes:.1f}" for minutes in machine.load_average)
    rows = {
        "versions": ", ".join(versions),
        "system": machine.system,
        "processor flags": " ".join(machine.cpu_flags) or _NOTHING,
        "cores, threads": f"{machine.num_cores}, {machine.num_threads}",
        "load average": load,
        "extras": ", ".join(extras),
        "hub": ", ".join(hub),
    }
    if machine.memory_limit_bytes is not None:
        rows["memory limit"] = f"{sized(machine.memory_limit_bytes)} ({machine.memory_limited_by})"
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _hub_variables(machine: Machine) -> list[str]:
    return [f"{name}={value}" for name, value in machine.hub.items() if name.isupper()]


def _device_table(machine: Machine) -> Table:
    table = Grid("device", "model", "memory", "free", "float32", "bfloat16", "float16", title="Devices")
    for device in machine.devices:
        dtypes = [device.dtypes[name] for name in ("float32", "bfloat16", "float16")]
        table.add_row(device.name, Text(device.model), sized(device.memory_bytes), sized(device.free_bytes), *dtypes)
    return table


def _print_invariance(console: Console, diagnosis: Diagnosis) -> None:
    if diagnosis.row_invariance.holds is None:
        console.print(Text("row invariance of the CPU kernels: not tested; --kernels tests it", style="dim"))
        return
    needed = [check for check in diagnosis.row_invariance.checks if check.needed]
    failed = [check for check in needed if not check.holds]
    table = Grid("kernel", "dtype", "rows that differ", title="Row invariance of the CPU kernels")
    for check in failed:
        table.add_row(Text(check.kernel), check.dtype, " ".join(map(str, check.rows_that_differ)))
    if failed:
        console.print(table)
        return
    rows = sorted({count for check in needed for count in check.rows_tried})
    sentence = f"row invariance: passed, {len(needed)} bfloat16 kernels among {rows[0]} to {rows[-1]} rows, bit for bit"
    console.print(Text(sentence, style="green"), soft_wrap=True)


def _print_pair(console: Console, pair: Preflight) -> None:
    table = Grid("", "target", "draft", title="Pair, from configurations and headers alone")
    for name, target, draft in _pair_rows(pair):
        table.add_row(name, Text(target), Text(draft))
    console.print(table)
    if pair.overlap is not None:
        overlap = pair.overlap
        share = (
            f"{overlap.num_shared} of {max(overlap.num_tokens)} tokens ({100 * overlap.share:.1f} %) have the same id"
        )
        equal = "equal" if overlap.equal else "different"
        console.print(Text(f"tokenizers: {equal}; {share}", style="green" if overlap.equal else "yellow"))
    if pair.shared_vocabulary is not None:
        console.print(Text(str(pair.shared_vocabulary)), soft_wrap=True)
        of_text = 100 * pair.shared_vocabulary.share_of_text
        ceiling = f"drafting by shared tokens accepts at most {of_text:.1f} % of such a text"
        console.print(Text(f"{ceiling}; drafting by text has no such limit"), soft_wrap=True)
    if pair.max_context is not None:
        text = f"effective context: {pair.max_context} tokens"
        if pair.draft_max_context is not None:
            text += f", drafted up to {pair.draft_max_context}"
        console.print(Text(text))
    if pair.outlook is not None:
        _print_outlook(console, pair.outlook)
    for problem in pair.problems:
        style = "bold red" if problem.severity == "error" else "yellow"
        hint = f" ({problem.hint})" if problem.hint else ""
        console.print(Text(f"{problem.severity}: {problem.message}{hint}", style=style), soft_wrap=True)


def _print_outlook(console: Console, outlook: Outlook) -> None:
    """The best possible speed-up of the pair, without the machine's own costs, which the text mentions."""
    from specdec_cli.measure.machine.outlook import Implied

    k = outlook.k
    table = Grid(
        "speed-up", "acceptance", "tokens a step", "", title=f"Best speed-up of this pair at k = {k}, by bytes alone"
    )
    step = 1 + outlook.cost_ratio * outlook.num_passes
    whose = "a drafted token" if outlook.num_passes == k else f"a pass of the draft, which gives {k} tokens,"
    rows = [(Implied(speedup, speedup * step, alpha), "") for alpha, speedup in outlook.speedup_by_acceptance.items()]
    rows += [(outlook.break_even, "break-even"), (Implied(outlook.ceiling, k + 1, 1.0), "everything accepted")]
    rows += [(claim, "the recipe's gate") for claim in outlook.claims]
    rows += [(outlook.synthetic, "synthetic, as the recipe says")] if outlook.synthetic is not None else []
    for implied, words in sorted(rows, key=lambda row: row[0].speedup):
        acceptance = "cannot be" if implied.acceptance is None else f"{implied.acceptance:.2f}"
        table.add_row(f"{implied.speedup:.2f}×", acceptance, f"{implied.acceptance_length:.2f}", words)
    console.print(table)
    console.print(
        Text(
            f"{whose} costs {outlook.cost_ratio:.4f} plain steps: {sized(outlook.draft_bytes)} over "
            f"{sized(outlook.target_bytes)} of weights read. Assumes memory-bound decoding and one acceptance "
            "probability for all tokens; a real machine gives less"
        ),
        soft_wrap=True,
    )


def _pair_rows(pair: Preflight) -> list[tuple[str, str, str]]:
    facts = {"target": pair.target, "draft": pair.draft}
    columns = [_facts_column(fact) for fact in facts.values()]
    if pair.draft is None and pair.draft_method != "model":
        columns[1]["name"] = f"method {pair.draft_method}"
    columns[1] |= {"method": pair.draft_method} if "+" in pair.draft_method else {}
    if pair.head is not None:
        columns[1]["draft head"] = pair.head
    if pair.self_draft is not None:
        columns[1]["made of"] = pair.self_draft.words
    if pair.target is not None and pair.target.num_mtp_modules:
        columns[0]["MTP modules"] = _mtp_words(pair.target, pair.draft_method)
    if pair.generation is not None and pair.generation.words:
        columns[0]["defaults of requests to serve"] = pair.generation.words
    for column, role in zip(columns, facts, strict=True):
        tokenizer, memory = pair.tokenizers.get(role), pair.memory.get(role)
        if tokenizer is not None:
            column["tokenizer's tokens"] = str(tokenizer.num_tokens)
            column["special tokens"] = " ".join(f"{key}={value}" for key, value in tokenizer.special_tokens.items())
            column["chat template"] = "yes" if tokenizer.has_chat_template else "no"
        if memory is not None:
            column["device"] = memory.device
            column["weights"] = sized(memory.weights)
            column["KV per token"] = _NOTHING if memory.kv_per_token is None else f"{memory.kv_per_token / 1e3:.1f} kB"
            column["KV, every sequence at full context"] = (
                _NOTHING if memory.kv_wanted is None else sized(memory.kv_wanted)
            )
            if memory.kv_planned is not None:
                planned = f"{sized(memory.kv_planned)}, {memory.kv_planned_tokens} tokens"
                column["KV cache that the engine plans"] = planned
            if memory.states:
                column["recurrent states"] = sized(memory.states)
                column["snapshots for prefix caching"] = _snapshots(memory)
            column["logits of a step"] = sized(memory.logits)
            if memory.taps_per_token is not None and memory.taps_most is not None:
                column["hidden states for the draft, per token"] = f"{memory.taps_per_token / 1e3:.1f} kB"
                column["the same, every prompt at full context"] = sized(memory.taps_most)
    names = list(columns[0] | columns[1])
    return [(name, columns[0].get(name, _NOTHING), columns[1].get(name, _NOTHING)) for name in names]


def _mtp_words(target: ModelFacts, draft_method: str) -> str:
    size = "" if target.mtp_bytes is None else f", {sized(target.mtp_bytes)}"
    is_used = draft_method.rpartition("+")[2] == "mtp"
    return f"{target.num_mtp_modules}{size}" + ("" if is_used else ": try --draft mtp")


def _snapshots(memory: Memory) -> str:
    """Memory of the snapshots by which prefixes of a model with a state are shared."""
    each, num = memory.prefix_state, memory.prefix_states_planned
    if num is None:
        return f"{sized(each)} each, with --prefix-caching"
    if not num:
        return f"{sized(each)} each, no room"
    return f"{sized(num * each)}: {num}, one after every {memory.tokens_apart} tokens"


def _facts_column(facts: ModelFacts | None) -> dict[str, str]:
    if facts is None:
        return {}
    missing = " (random weights)" if facts.load_format == "dummy" else " (weights are not downloaded yet)"
    where = "" if facts.is_complete else missing
    stored = {}
    if facts.stored_as not in (None, "safetensors") and facts.stored_bytes is not None:
        stored["files"] = f"{sized(facts.stored_bytes)} as {facts.stored_as}"
    return {
        "name": facts.name + where,
        "architecture": facts.architecture + (", mixture of experts" if facts.is_mixture_of_experts else ""),
        "parameters": f"{in_millions(facts.num_parameters)}, from {facts.weights_counted_in}",
        **stored,
        "dtype": facts.dtype,
        "decoder": facts.decoder,
        "context limit": str(facts.max_context),
        "logits' width": str(facts.embedding_size),
        "end tokens": " ".join(map(str, facts.eos_token_ids)) or _NOTHING,
    }


def _verdict(diagnosis: Diagnosis) -> Text:
    if diagnosis.verdict == "ok":
        what = "the pair can run" if diagnosis.pair is not None else "ready; name a pair to check it: --target, --draft"
        return Text(f"OK: {what}", style="bold green")
    words = {"incompatible": "the pair does not fit together", "cannot-run": "the pair cannot run here"}
    return Text(f"NOT OK: {words[diagnosis.verdict]}", style="bold red")
