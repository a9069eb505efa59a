"""lm-eval's `local-completions` on a server against its `--model hf` on the same folder: accuracy, generations, scores.

Two local tasks are made from the package's own prompts, so that no hub is asked: which ending belongs to a beginning
(log-likelihoods, `acc`), and how a prompt goes on (`generate_until`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PROMPTS = Path(__file__).parents[1] / "specdec_cli" / "measure" / "workload" / "prompts"
NUM_ROWS = 24
CHOICE, CONTINUE = "specdec_choice", "specdec_continue"
_SHARED = """dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
num_fewshot: 0
"""
_CHOICE = f"""task: {CHOICE}
output_type: multiple_choice
doc_to_text: "{{{{beginning}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
_CONTINUE = f"""task: {CONTINUE}
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{ending}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
MAX_DIFFERENCE = 1e-3
"""Two kernels' sums of float32 log-probabilities differ by less."""


def write_tasks(folder: Path) -> Path:
    """Both tasks and their rows, for `--include_path`."""
    prompts = [json.loads(line)["prompt"] for line in (PROMPTS / "stories.jsonl").read_text().splitlines()][:NUM_ROWS]
    words = [prompt.split() for prompt in prompts]
    halves = [(" ".join(one[: len(one) // 2]), " ".join(one[len(one) // 2 :])) for one in words]
    rows = []
    for i, (prompt, (beginning, ending)) in enumerate(zip(prompts, halves, strict=True)):
        others = [halves[(i + step) % len(halves)][1] for step in (7, 19)]
        endings = [*others[: i % 3], ending, *others[i % 3 :]]
        row = {"prompt": prompt, "beginning": beginning, "ending": ending, "endings": endings, "label": i % 3}
        rows.append(json.dumps(row))
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("\n".join(rows) + "\n")
    for name, own in ((CHOICE, _CHOICE), (CONTINUE, _CONTINUE)):
        (folder / f"{name}.yaml").write_text(own + _SHARED % json.dumps(str(data)))
    return folder


def lm_eval_rows(
    urls: Mapping[str, str], model: str, api_key: str, folder: str, tasks: Path
) -> Iterator[dict[str, Any]]:
    """Each arm of `local-completions`, compared with `hf`.

    Args:
        urls: servers of the same model by name (`k=3`, `k=0`).
        model: the name that they serve.
        api_key: what they want.
        folder: the model's own.
        tasks: where `write_tasks` may write.
    """
    import os

    os.environ["OPENAI_API_KEY"] = api_key
    write_tasks(tasks)
    expected = evaluate("hf", f"pretrained={folder},dtype=float32,device=cpu", tasks, 1)
    for said, url in urls.items():
        place = f"model={model},base_url={url}/v1/completions,max_length=512"
        given = f"{place},tokenizer={folder},tokenizer_backend=huggingface"
        for concurrent, batch in ((1, 1), (1, 8), (8, 1)):
            found = evaluate(
                "local-completions", f"{given},add_bos_token=True,num_concurrent={concurrent}", tasks, batch
            )
            yield {"arm": f"{said}, num_concurrent={concurrent}, batch_size={batch}", **compare(expected, found)}
    bare = evaluate("local-completions", f"{given},num_concurrent=8", tasks, 1)
    remote = evaluate("local-completions", f"{place},num_concurrent=8", tasks, 1)
    yield {"arm": "the server's tokenizer, against the folder's, both without BOS", **compare(bare, remote)}


def evaluate(model: str, arguments: str, tasks: Path, batch_size: int) -> dict[str, Any]:
    """Accuracy, choices' scores and generations of one run."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    given: Any = {"model_args": arguments, "tasks": [CHOICE, CONTINUE], "task_manager": manager}
    found: Any = lm_eval.simple_evaluate(model=model, batch_size=batch_size, log_samples=True, **given)
    samples = {name: sorted(rows, key=lambda row: row["doc_id"]) for name, rows in found["samples"].items()}
    scores = [(float(one[0][0]), bool(one[0][1])) for row in samples[CHOICE] for one in row["resps"]]
    return {
        "acc": found["results"][CHOICE]["acc,none"],
        "scores": [score for score, _ in scores],
        "is_greedy": [greedy for _, greedy in scores],
        "texts": [row["resps"][0][0] for row in samples[CONTINUE]],
    }


def compare(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """How one run differs from another."""
    differences = [abs(a - b) for a, b in zip(expected["scores"], found["scores"], strict=True)]
    same = [a == b for a, b in zip(expected["texts"], found["texts"], strict=True)]
    row = {
        "acc": round(found["acc"], 4),
        "acc_hf": round(expected["acc"], 4),
        "generations_equal": f"{sum(same)} of {len(same)}",
        "is_greedy_equal": expected["is_greedy"] == found["is_greedy"],
        "largest_score_difference": max(differences),
    }
    equal = row["acc"] == row["acc_hf"] and all(same) and row["is_greedy_equal"] and max(differences) < MAX_DIFFERENCE
    return row | {"result": "equal" if equal else "different"}
