"""The first help of each command: the options that a new user needs, and three examples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Guide:
    """The first help of one command.

    Args:
        common: names of the common options, in the order in which they are shown; empty shows every option.
        examples: what a command line does, and the line.
    """

    common: tuple[str, ...] = ()
    examples: tuple[tuple[str, str], ...] = ()

    def pick(self, options: Iterable[Any]) -> list[Any]:
        """The common ones of a command's options, in this guide's order."""
        if not self.common:
            return list(options)
        found = {name: option for option in options for name in option.opts}
        return [found[name] for name in (*self.common, "--help-all", "--help")]


_MODELS = ("--recipe", "--target", "--draft", "--num-speculative-tokens")
_RESULT = ("--json", "--output")

GUIDES: dict[str, Guide] = {
    "specdec": Guide(
        examples=(
            ("Decode a prompt with the built-in pair.", 'specdec generate "Once upon a time"'),
            ("Find the best k for a target and a draft.", "specdec sweep-k -t MODEL -d DRAFT"),
            ("Serve an OpenAI-compatible API.", "specdec serve --recipe tuned.yaml"),
        )
    ),
    "specdec generate": Guide(
        (
            *_MODELS,
            *("--engine", "--max-new-tokens", "--temperature", "--seed", "--prompt-file", "--chat", "--compare"),
            *_RESULT,
        ),
        (
            (
                "Decode with and without the draft and show the speed-up.",
                'specdec generate "Once upon a time" --compare',
            ),
            ("Use your own target and draft.", 'specdec generate "Hello" -t MODEL -d DRAFT -k 4 --chat'),
            (
                "Decode a file of prompts into a JSON document.",
                "specdec generate --prompt-file prompts.jsonl --output result.json",
            ),
        ),
    ),
    "specdec chat": Guide(
        (*_MODELS, "--system", "--endpoint", "--max-new-tokens", "--temperature", "--max-model-len", *_RESULT),
        (
            ("Chat with the built-in pair.", "specdec chat"),
            (
                "Chat with your own model.",
                'specdec chat -t MODEL -d DRAFT -k 4 --system "Answer in one sentence."',
            ),
            ("Chat with a running server.", "specdec chat --endpoint http://127.0.0.1:8000"),
        ),
    ),
    "specdec serve": Guide(
        (
            *_MODELS,
            "--engine",
            "--host",
            "--port",
            "--api-key",
            "--served-model-name",
            "--max-num-seqs",
            "--max-model-len",
            "--dry-run",
        ),
        (
            ("Serve the built-in pair on port 8000.", "specdec serve"),
            ("Serve a model with an n-gram draft.", "specdec serve MODEL --draft ngram --port 9000"),
            (
                "Serve a recipe to other machines, with a key.",
                "specdec serve -r tuned.yaml --host 0.0.0.0 --api-key KEY",
            ),
        ),
    ),
    "specdec bench": Guide(
        (
            *_MODELS,
            "--engine",
            "--endpoint",
            "--dataset",
            "--num-prompts",
            "--batch-size",
            "--max-new-tokens",
            *_RESULT,
            "--markdown",
        ),
        (
            ("Measure the built-in pair on eight prompts.", "specdec bench --num-prompts 8"),
            (
                "Fail with exit code 3 if the draft does not pay off.",
                "specdec bench -r tuned.yaml --fail-if 'speedup.decode < 1.2' --junit gates.xml",
            ),
            (
                "Measure a running server.",
                "specdec bench --endpoint http://127.0.0.1:8000 --request-rate 2 --num-prompts 32",
            ),
        ),
    ),
    "specdec compare-drafts": Guide(
        (
            "--recipe",
            "--target",
            "--draft",
            "--engine",
            "--k-max",
            "--dataset",
            "--num-prompts",
            "--batch-size",
            "--max-new-tokens",
            *_RESULT,
            "--html",
        ),
        (
            ("Compare the built-in draft with an n-gram draft.", "specdec compare-drafts -d builtin:draft -d ngram"),
            (
                "Compare two draft models on your own data set.",
                "specdec compare-drafts -t MODEL -d DRAFT-A -d DRAFT-B --dataset prompts.jsonl",
            ),
            (
                "Write a page with tables and plots.",
                "specdec compare-drafts -d builtin:draft -d ngram:max=4 --html drafts.html",
            ),
        ),
    ),
    "specdec train-draft": Guide(
        (
            "--recipe",
            "--target",
            "--method",
            "--data",
            "--chat",
            "--output",
            "--resume",
            "--export",
            "--max-new-tokens",
            "--temperature",
            "--epochs",
            "--batch-size",
            "--dry-run",
        ),
        (
            (
                "Train an EAGLE-3 head for the built-in target.",
                "specdec train-draft --method eagle3 --data builtin:stories --output head",
            ),
            (
                "Train one for your own model on your chats.",
                "specdec train-draft -t MODEL --data chats.jsonl --chat --temperature 0.7 --output head",
            ),
            (
                "Write a head as vLLM's speculators library has it.",
                "specdec train-draft --export speculators head -t MODEL --output speculator",
            ),
        ),
    ),
    "specdec sweep-k": Guide(
        (
            "--recipe",
            "--target",
            "--draft",
            "--engine",
            "--k-max",
            "--dataset",
            "--num-prompts",
            "--batch-sizes",
            "--max-new-tokens",
            "--write-recipe",
            *_RESULT,
            "--html",
        ),
        (
            ("Find k for the built-in pair.", "specdec sweep-k --num-prompts 8"),
            (
                "Find k for your models and write a recipe for serve.",
                "specdec sweep-k -t MODEL -d DRAFT --write-recipe tuned.yaml",
            ),
            (
                "Find k at three batch sizes.",
                "specdec sweep-k -r builtin --batch-sizes 1,4,16 --num-prompts 32 --output sweep.json",
            ),
        ),
    ),
    "specdec audit": Guide(
        (
            *_MODELS,
            "--mode",
            "--prompt-file",
            "--num-prompts",
            "--k-values",
            "--batch-sizes",
            "--time-limit",
            *_RESULT,
        ),
        (
            ("Audit the built-in pair for a minute.", "specdec audit"),
            (
                "Audit greedy decoding of your models for ten minutes.",
                "specdec audit -t MODEL -d DRAFT --mode greedy --time-limit 600",
            ),
            ("Check the sampler's distribution without a model.", "specdec audit --table --full"),
        ),
    ),
    "specdec doctor": Guide(
        ("--recipe", "--target", "--draft", "--dtype", "--device", *_RESULT),
        (
            ("Check this machine.", "specdec doctor"),
            ("Check a pair without loading its weights.", "specdec doctor -t MODEL -d DRAFT"),
            ("Check a recipe and write the report.", "specdec doctor -r tuned.yaml --output doctor.json"),
        ),
    ),
    "specdec export": Guide(
        (
            *("--recipe", "--target", "--draft", "--num-speculative-tokens", "--temperature", "--tensor-parallel-size"),
            *("--measured", "--output", "--json"),
        ),
        (
            ("Print a vLLM start script.", "specdec export vllm -t MODEL -d DRAFT -k 4 --tensor-parallel-size 2"),
            ("Write TensorRT-LLM's files for Triton.", "specdec export triton -r mine.yaml --output triton"),
            ("Put measured figures into them.", "specdec export sglang -r tuned.yaml --measured result.json"),
        ),
    ),
    "specdec import": Guide(
        ("--before", "--fail-if", "--json", "--output"),
        (
            ("Read the log of a vLLM server.", "specdec import vllm.log"),
            ("Read what a server counted during a run.", "specdec import after.txt --before before.txt"),
            (
                "Fail if too little is accepted.",
                "specdec import bench.json --fail-if 'speculative.acceptance_length<2'",
            ),
        ),
    ),
    "specdec recipe": Guide(
        examples=(
            ("List the shipped recipes.", "specdec recipe list"),
            ("Start a recipe of your own.", "specdec recipe copy builtin mine.yaml"),
            ("Check it.", "specdec recipe validate mine.yaml"),
        )
    ),
    "specdec recipe list": Guide(
        examples=(
            ("List the shipped recipes.", "specdec recipe list"),
            ("List them as JSON.", "specdec recipe list --json"),
            ("Write the list to a file.", "specdec recipe list --output recipes.json"),
        )
    ),
    "specdec recipe show": Guide(
        ("--recipe", "--origin", "--set", "--target", "--draft", "--num-speculative-tokens", *_RESULT),
        (
            ("Show a shipped recipe.", "specdec recipe show builtin"),
            ("Show where each value comes from.", "specdec recipe show mine.yaml --origin"),
            ("Show what a flag changes.", "specdec recipe show builtin -k 6 --set sampling.temperature=0.7"),
        ),
    ),
    "specdec recipe copy": Guide(
        examples=(
            ("Copy a recipe into this folder.", "specdec recipe copy builtin"),
            ("Copy it under another name.", "specdec recipe copy builtin-ngram mine.yaml"),
            ("Overwrite a file.", "specdec recipe copy builtin mine.yaml --force"),
        )
    ),
    "specdec recipe validate": Guide(
        examples=(
            ("Check a recipe.", "specdec recipe validate mine.yaml"),
            ("Check several recipes.", "specdec recipe validate a.yaml b.yaml builtin"),
            ("List the errors as JSON.", "specdec recipe validate mine.yaml --json"),
        )
    ),
    "specdec recipe schema": Guide(
        examples=(
            ("Print the JSON Schema.", "specdec recipe schema"),
            ("Write it for an editor.", "specdec recipe schema > recipe.schema.json"),
            ("Print one section.", "specdec recipe schema | jq '.[\"$defs\"].Sampling'"),
        )
    ),
}
