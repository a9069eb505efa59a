"""Bad input ends with exit 1 or 2 and one clear sentence: no traceback, nothing on stdout, nothing overwritten."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from tiny_engine import letter_tokenizer
from tiny_models import make_tiny

from specdec_cli.cli.main import run

RUN, USAGE = 1, 2


@dataclass(frozen=True)
class Case:
    """One command line (`@/` stands for the folder of sound models), its exit code and what its sentence says."""

    name: str
    arguments: tuple[str, ...]
    code: int
    said: tuple[str, ...]
    files: dict[str, str | bytes] | None = None
    environment: dict[str, str] | None = None
    stdin: bytes = b""
    make: Callable[[Path, Path], Any] | None = None


def case(name: str, arguments: str | list[str], code: int, *said: str, **rest) -> Case:
    words = arguments.split() if isinstance(arguments, str) else arguments
    return Case(name, tuple(words), code, said, **rest)


def generate(name: str, arguments: str | list[str], *said: str, code: int = USAGE, **rest) -> Case:
    """A `generate` with a sound prompt at its end, refused before any model is looked at unless the name says so."""
    words = arguments.split() if isinstance(arguments, str) else arguments
    return case(name, ["generate", *words, "Once upon"], code, *said, **rest)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that load: a target and a draft of its family, and a Reformer's folder."""
    folder = tmp_path_factory.mktemp("sound")
    for seed, name in enumerate(["target", "draft"]):
        make_tiny("llama", folder / name, seed)
        letter_tokenizer().save_pretrained(folder / name)
    transformers.ReformerConfig(architectures=["ReformerModelWithLMHead"], is_decoder=True).save_pretrained(
        folder / "reformer"
    )
    letter_tokenizer().save_pretrained(folder / "reformer")
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in, no variables of ours, a closed port for a hub."""
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        monkeypatch.delenv(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def contents(*folders: Path) -> dict[Path, tuple[int, int]]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}


def assert_one_sentence(err: str, *said: str) -> None:
    lines = err.rstrip("\n").split("\n")
    assert lines[0].startswith("error: "), err
    assert len(lines) == 1 or (len(lines) == 3 and not lines[1] and lines[2].startswith("hint: ")), err
    assert "Traceback" not in err
    assert not re.search(r"unexpected|Error\b|None\b|<class", lines[0]), f"vague: {lines[0]}"
    assert len(lines[0]) < 320, lines[0]
    for words in said:
        assert words in err, err


def model(change: Callable[[Path], Any], role: str = "target") -> Callable[[Path, Path], Any]:
    """A copy of a sound model, `./model`, with something done to it."""

    def make(sound: Path, here: Path) -> None:
        shutil.copytree(sound / role, here / "model")
        change(here / "model")

    return make


def drop(*files: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / file).unlink() for file in files]


def write(file: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(text)


def edit_config(**changes) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def lose_a_layer(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def foreign_tokenizer(folder: Path) -> None:
    """One with more tokens than the model has rows in its embedding."""
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens([f"word{i}" for i in range(40)])
    tokenizer.save_pretrained(folder)


def broken(name: str, change: Callable[[Path], Any], *said: str, code: int = RUN) -> Case:
    return generate(f"model: {name}", "-t ./model --quiet", *said, code=code, make=model(change))


def no_files(sound: Path, here: Path) -> None:
    (here / "model").mkdir()


ON_TARGET = "-t @/target -d none --quiet"
MODELS = [
    generate("model: missing folder", "-t ./none --quiet", "model folder `./none` does not exist"),
    generate("model: empty name", ["-t", "", "--quiet"], "`--target` must not be empty"),
    generate("model: empty folder", "-t ./model --quiet", "`./model`", code=RUN, make=no_files),
    generate("model: its weights", "-t ./a.safetensors --quiet", "give its folder, `.`", files={"a.safetensors": "x"}),
    generate("model: a file", "-t ./a.txt --quiet", "is a file, not a model folder", files={"a.txt": "x"}),
    generate("model: unknown built-in", "-t builtin:huge --quiet", "unknown built-in model `builtin:huge`"),
    generate("model: NUL byte in its name", ["-t", "a\0b", "--quiet"], "does not exist"),
    broken("no weights", drop("model.safetensors"), "has no weights"),
    broken("no config", drop("config.json"), "has no `config.json`"),
    broken("broken config", write("config.json", "{"), "config.json` cannot be read"),
    broken("config of nothing", write("config.json", "{}"), "does not say a `model_type`"),
    broken("config with impossible values", edit_config(num_attention_heads="many"), "config.json` is not a valid"),
    broken("config larger than any memory", edit_config(hidden_size=10**12), "does not fit into memory"),
    broken("config with an unknown activation", edit_config(hidden_act="nope"), "unknown or missing `nope`"),
    broken("config that contradicts itself", edit_config(num_attention_heads=3), "is not a valid", "32", "3"),
    broken("broken generation config", write("generation_config.json", "{"), "generation_config.json` cannot be read"),
    broken("a renamed file", pickle_weights, "pytorch_model.bin` holds something else than tensors", "safetensors"),
    broken("truncated weights", truncate, "not a whole safetensors file"),
    broken("a weight is missing", lose_a_layer, "`model.layers.1.mlp.up_proj.weight` is missing"),
    broken("weights of other shapes", edit_config(hidden_size=64), "do not match its `config.json`", "another shape"),
    broken("no tokenizer", drop("tokenizer.json", "tokenizer_config.json"), "has no tokenizer"),
    broken("broken tokenizer", write("tokenizer.json", "{"), "tokenizer of `./model` does not load"),
    case(
        "model: a prompt that only the tokenizer of a larger model knows",
        ["generate", "-t", "./model", "-d", "none", "--quiet", "word30"],
        USAGE,
        "token `117`",
        "`97` tokens",
        make=model(foreign_tokenizer),
    ),
    broken("unknown architecture", edit_config(model_type="hyperllama"), "architecture `hyperllama`", code=USAGE),
    broken("code of its own", edit_config(model_type="x", auto_map={"AutoConfig": "x.X"}), "Python code", code=USAGE),
    generate("model: Reformer", "-t @/reformer --quiet", "architecture `reformer`", "into buckets"),
    generate("model: Reformer as draft", "-t @/target -d @/reformer --quiet", "`reformer`", "into buckets"),
    generate("draft: missing folder", "-t @/target -d ./none --quiet", "model folder `./none` does not exist"),
    generate("model: NUL byte in the draft", ["-t", "@/target", "-d", "a\0b", "--quiet"], "does not exist"),
]

NUMBERS = [
    generate("k negative", "-k -1", "`--num-speculative-tokens` must be at least 0, not `-1`"),
    generate("k huge", "-k 100000", "`--num-speculative-tokens` must be at most 64, not `100000`"),
    generate("k no number", "-k four", "`--num-speculative-tokens` must be a valid integer"),
    generate("k a fraction", "-k 1.5", "`--num-speculative-tokens` must be a valid integer"),
    generate("temperature NaN", "--temperature nan", "`--temperature` must be a finite number"),
    generate("temperature infinite", "--temperature inf", "`--temperature` must be a finite number"),
    generate("temperature negative", "--temperature -0.5", "`--temperature` must be at least 0"),
    generate("temperature no number", "--temperature hot", "`--temperature` must be a valid number"),
    generate("top-p 0", "--top-p 0", "`--top-p` must be above 0"),
    generate("top-p 2", "--top-p 2", "`--top-p` must be at most 1"),
    generate("top-k 0", "--top-k 0", "`--top-k` must be at least 1"),
    generate("min-p 2", "--min-p 2", "`--min-p` must be at most 1"),
    generate("repetition penalty 0", "--repetition-penalty 0", "`--repetition-penalty` must be at least 0.0001"),
    generate("presence penalty NaN", "--presence-penalty nan", "`--presence-penalty` must be a finite number"),
    generate("no new tokens", "-n 0", "`--max-new-tokens` must be at least 1"),
    generate("min-tokens negative", "--min-tokens -3", "`--min-tokens` must be at least 0"),
    generate("seed far below 0", f"--seed {-(2**64)}", "`--seed` must be"),
    generate("seed huge", f"--seed {2**64}", "`--seed` must be"),
    generate("logprobs too many", "--logprobs 1000 --json", "`--logprobs` must be at most 100"),
    generate("batch of none", "--max-num-seqs 0", "`--max-num-seqs` must be at least 1"),
    generate("context of one", "--max-model-len 1", "`--max-model-len` must be at least 2"),
    generate("batch size to stop at 0", "--disable-by-batch-size 0", "`--disable-by-batch-size` must be at least 1"),
    generate("memory share 0", "--gpu-memory-utilization 0", "`--gpu-memory-utilization` must be above 0"),
    generate("memory share NaN", "--gpu-memory-utilization nan", "`--gpu-memory-utilization` must be above 0"),
    generate("p-min above 1", "--depth-policy confidence --p-min 1.5", "`--p-min` must be at most 1"),
    generate("p-min without its policy", "--p-min 0.5", "`--p-min` has no effect with depth_policy `fixed`"),
    generate("logit bias malformed", "--logit-bias 7", "`--logit-bias 7` is not ID=BIAS"),
    generate("logit bias NaN", "--logit-bias 7=nan", "`--logit-bias`", "finite number"),
    generate("logit bias twice", "--logit-bias 7=1 --logit-bias 7=2", "`--logit-bias`", "twice"),
    generate("logit bias negative id", f"{ON_TARGET} --logit-bias -4=1", "-4"),
    generate("logit bias of no token", f"{ON_TARGET} --logit-bias 500=1", "`500`", "87"),
    generate("logit bias huge", "--logit-bias 7=1e300", "`--logit-bias` must be at most"),
    generate("presence penalty huge", "--presence-penalty 1e300", "`--presence-penalty` must be at most 10000"),
    generate("stop empty", ["--stop", ""], "`--stop`", "must not be empty"),
    generate("stop token negative", "--stop-token-id -1", "`--stop-token-id`", "at least 0"),
    generate("stop token of no token", f"{ON_TARGET} --stop-token-id 96", "`96`", "87"),
]

CHOICES = [
    generate("unknown verify mode", "--verify gredy", "`--verify` must be one of", "did you mean `greedy`?"),
    generate(
        "greedy that samples", "--verify greedy --temperature 1", "`--verify` `greedy` does not fit temperature `1`"
    ),
    generate("unknown depth policy", "--depth-policy wild", "`--depth-policy` must be one of"),
    generate("unknown dtype", "--dtype float8", "`--dtype` must be one of"),
    generate("quantization", "--quantize int5", "`--quantize` must be one of none, int8"),
    generate(
        "tensor parallelism",
        "--tensor-parallel-size 2",
        "`target.tensor_parallel_size` is `2`, and specdec runs a model on one device",
        "specdec export vllm",
    ),
    generate("tensor parallelism 0", "--tensor-parallel-size 0", "`--tensor-parallel-size` must be at least 1"),
    generate("unknown device", "--device tpu", "`--device` must be auto, cpu, cuda or cuda:N"),
    generate("a GPU that is not here", f"{ON_TARGET} --device cuda:77", "device `cuda:77` is not here", code=RUN),
    generate("unknown draft method", "-d ngrm:max=3", "`ngrm`", "did you mean `ngram`?"),
    generate("unknown draft option", "-d ngram:maxi=3", "no option `maxi`", "did you mean `max`?"),
    generate("draft option out of range", "-d ngram:max=1,min=2", "`max`"),
    generate("draft option no number", "-d ngram:max=three", "must be a whole number"),
    generate("draft option twice", "-d ngram:max=3,max=4", "twice"),
    generate("draft option of none", "-d none:x=1", "no option `x`"),
    generate("draft empty", ["-d", ""], "the draft is empty"),
    generate("draft prediction without text", "-d prediction", "`prediction` has no text to read"),
    generate("all layers draft", "-t builtin:target -d self-exit:14", "`self-exit:14` drafts with 14 layers"),
    generate("no layer drafts", "-d self-exit:0", "`layers` must be at least 1"),
    # `--quiet`, for a decoder that is compiled first says so.
    generate("int8 of int8", "--quiet -t builtin:target --quantize int8 -d self-int8", "quantized already"),
    generate("draft for later: parallel", "-d parallel:./x", "`parallel:./x` is not available"),
    generate("draft pair without a second", "-d ngram+none", "`ngram+none` names no draft after the plus sign"),
    generate("draft pair with a model first", "-d gpt2+ngram", "`gpt2` cannot come before another one"),
    generate("draft pair in a recipe", "-d gpt2 --set draft.first=nothing", "`nothing` cannot come before another one"),
    generate("suffix option out of range", "-d suffix:min_prob=2", "`min_prob` of `suffix` must be above 0"),
    generate("prediction empty", ["--prediction", " "], "`--prediction` is empty"),
    generate("prediction of another draft", "--prediction x -d ngram", "`--prediction` is read by the draft"),
    generate("draft options without a model", "-t @/target -d ngram --draft-dtype float32", "loads no model"),
    generate("compare without a draft", "-d none --compare", "nothing to compare"),
    generate("compare at k 0", "-k 0 --compare", "nothing to compare"),
    generate("show-drafts in JSON", "--show-drafts --json", "`--show-drafts`"),
    generate("logprobs without JSON", "--logprobs 2", "`--logprobs` is for the JSON document"),
    generate("unknown option", "--temprature 1", "no option `--temprature`", "did you mean `--temperature`?"),
    generate("tree of no shape", "--tree 4,x", "the tree `4,x` is not a shape"),
    generate("tree of too many nodes", "--tree 9,9", "`90` nodes"),
    case("unknown command", "genrate hello", USAGE, "no command `genrate`", "did you mean `generate`?"),
    case("training without data", "train-draft --output @/head", USAGE, "there is no data to train on"),
    case("unknown recipe command", "recipe lst", USAGE, "no command `lst`"),
]

JSONL = "generate --prompt-file rows.jsonl"


def rows(name: str, text: str | bytes, *said: str) -> Case:
    return case(f"JSONL: {name}", JSONL, USAGE, *said, files={"rows.jsonl": text})


PROMPTS = [
    case("prompt empty", ["generate", ""], USAGE, "the prompt is empty"),
    case("prompt of spaces", ["generate", " \n "], USAGE, "the prompt is empty"),
    case("prompt empty among others", ["generate", "one", ""], USAGE, "prompt 2 of 2 is empty"),
    case("prompt broken Unicode", ["generate", "a\udcff"], USAGE, "not valid Unicode"),
    case("no prompt in the pipe", ["generate"], USAGE, "the prompt on standard input is empty"),
    case("pipe not UTF-8", ["generate"], USAGE, "standard input is not valid UTF-8", stdin=b"abc\xff"),
    case("two stdins", "generate - -", USAGE, "stands twice"),
    case("two sources", "generate --prompt-file p.txt hello", USAGE, "--prompt-file", files={"p.txt": "x"}),
    case("prompt file missing", "generate --prompt-file no.txt", USAGE, "`no.txt` cannot be read: No such file"),
    case("prompt file a folder", "generate --prompt-file .", USAGE, "cannot be read: Is a directory"),
    case("prompt file empty", "generate --prompt-file p.txt", USAGE, "`p.txt` has no prompt", files={"p.txt": ""}),
    case("prompt file blank", "generate --prompt-file p.txt", USAGE, "has no prompt", files={"p.txt": " \n\n"}),
    case(
        "prompt file not UTF-8", "generate --prompt-file p.txt", USAGE, "not valid UTF-8", files={"p.txt": b"a\xff\xfe"}
    ),
    case(
        "prompt file in UTF-16 that ends in half a character",
        "generate --prompt-file p.txt",
        USAGE,
        "not valid UTF-16",
        files={"p.txt": "ab".encode("utf-16")[:-1]},
    ),
    case(
        "prompt file in UTF-16 without its mark",
        "generate --prompt-file p.txt",
        USAGE,
        "is no text: it holds a NUL byte",
        "UTF-16",
        files={"p.txt": "ab".encode("utf-16-le")},
    ),
    case(
        "prompt file name too long",
        ["generate", "--prompt-file", "a" * 260],
        USAGE,
        "prompt file `aaa",
        "cannot be read: File name",
    ),
    rows("no JSON", '{"prompt": "a"}\n{"prompt": \n', "rows.jsonl:2: not a JSON object"),
    rows(
        "a key twice",
        '{"prompt": "a"}\n{"prompt": "b", "prompt": "c"}\n',
        "rows.jsonl:2: the key `prompt` is given twice",
    ),
    rows("a list", "[1]\n", "rows.jsonl:1: not a JSON object but a list"),
    rows("no prompt", '{"words": "a"}\n', "rows.jsonl:1: the row has no `prompt`, but `words`", "FILE?column=NAME"),
    rows("prompt a number", '{"prompt": 3}\n', "rows.jsonl:1: the prompt must be a string, not a number"),
    rows("prompt empty", '{"prompt": ""}\n', "rows.jsonl:1: the prompt is empty"),
    rows("turns empty", '{"turns": []}\n', "rows.jsonl:1: `turns`"),
    rows("length no number", '{"prompt": "a", "max_new_tokens": "9"}\n', "`max_new_tokens` must be an integer"),
    rows("length 0", '{"prompt": "a", "max_new_tokens": 0}\n', "`max_new_tokens` must be an integer of at least 1"),
    rows("seed no integer", '{"prompt": "a", "seed": -1.5}\n', "`seed` must be an integer below 2^63"),
    rows("half a surrogate", '{"prompt": "\\ud800"}\n', "not valid Unicode"),
    rows("very deep", "[" * 100_000 + "\n", "not a JSON object"),
    rows("NUL bytes", b'{"prompt": "a\0b"}\n', "holds a NUL byte at `13`"),
    case("prompt longer than the context", ["generate", *ON_TARGET.split(), "ab " * 100], USAGE, "context is `128`"),
    case(
        "prompt longer than max-model-len",
        ["generate", *ON_TARGET.split(), "--max-model-len", "8", "a b c d e f g h"],
        USAGE,
        "context is `8`",
    ),
    generate("chat without a template", f"{ON_TARGET} --chat", "has no chat template"),
    generate(
        "chat with a broken template",
        "-t ./model -d none --chat --quiet",
        "the chat template of `./model` is broken",
        make=model(write("chat_template.jinja", "{% for %}")),
    ),
    generate(
        "chat with a template that fails",
        "-t ./model -d none --chat --quiet",
        "the chat template of `./model` refuses these messages",
        make=model(write("chat_template.jinja", "{{ messages + 1 }}")),
    ),
    generate("system without a template", f"{ON_TARGET} --system hello", "has no chat template"),
]


def recipe(name: str, text: str | bytes, *said: str) -> Case:
    files = {"my.yaml": text}
    return generate(f"recipe: {name}", "-r my.yaml", "my.yaml", *said, files=files)


RECIPES = [
    generate("recipe: unknown name", "-r bultin", "no recipe `bultin`", "did you mean `builtin`?"),
    generate("recipe: missing file", "-r ./no.yaml", "there is no file `./no.yaml`"),
    generate("recipe: a folder", "-r .", "is a folder"),
    recipe("unknown key", "sampling: {temperatur: 1}", "my.yaml:1:12", "did you mean `temperature`?"),
    recipe("unknown section", "samplin: {temperature: 1}", "my.yaml:1:1", "did you mean `sampling`?"),
    recipe("duplicate key", "sampling:\n  seed: 1\n  seed: 2\n", "my.yaml:3:3: duplicate key `seed`"),
    recipe("wrong type", 'sampling: {seed: "1"}', "my.yaml:1:18", "must be a whole number"),
    recipe("number for text", "target: {model: 12}", "must be text", "put it in quotes"),
    recipe("out of range", "sampling: {top_p: 2}", "my.yaml:1:19", "must be at most 1"),
    recipe("NaN", "sampling: {temperature: .nan}", "must be a finite number"),
    recipe("section a list", "sampling: [1]", "must be a mapping"),
    recipe("root a list", "[1, 2]", "my.yaml:1:1", "a mapping of sections"),
    recipe("several drafts", "draft: [{method: ngram}]", "only `compare-drafts` takes"),
    recipe("unknown method", "draft: {method: ngrm}", "did you mean `ngram`?"),
    recipe("model with a method", "draft: {model: x, method: ngram}", "give one of them"),
    recipe("empty", "", "the recipe is empty"),
    recipe("tag", "target: !!python/object/apply:os.system [ls]", "my.yaml:1:9", "is not allowed"),
    recipe("tab", "sampling:\n\tseed: 1\n", "my.yaml:2:1", "use spaces"),
    recipe("two documents", "sampling: {seed: 1}\n---\nsampling: {seed: 2}\n", "a second begins here"),
    recipe("not closed", "sampling: {seed: 1", "my.yaml:", "not YAML"),
    recipe("not UTF-8", b"sampling: {seed: \xff}", "my.yaml:1:18", "is not UTF-8"),
    recipe("NUL byte", "sampling: {seed: \0}", "control character `U+0000`"),
    recipe("too large", "#" + "x" * (2 << 20), "larger than 1 MiB"),
    recipe("too deep", "[" * 60 + "]" * 60, "nested deeper than"),
    recipe("trusted code", "target: {model: x, trust_remote_code: true}", "never taken from a recipe"),
    recipe(
        "greedy that samples", "speculation: {verify: greedy}\nsampling: {temperature: 1}", "my.yaml:1:23", "greedy"
    ),
    generate(
        "recipe: greedy, sampled by a flag",
        "-r my.yaml --temperature 0.5",
        "`--temperature` `0.5` does not fit verification mode `greedy`",
        files={"my.yaml": "speculation: {verify: greedy}"},
    ),
    generate(
        "environment: unknown variable", "", "`SPECDEC_SAMPLING_SEDE`", environment={"SPECDEC_SAMPLING_SEDE": "1"}
    ),
    generate("environment: wrong value", "", "`SPECDEC_SAMPLING_SEED`", environment={"SPECDEC_SAMPLING_SEED": "one"}),
    generate("environment: trusted code", "", "never taken", environment={"SPECDEC_TARGET_TRUST_REMOTE_CODE": "true"}),
    generate("set: no value", "--set sampling.seed", "is not KEY.PATH=VALUE"),
    generate("set: unknown key", "--set sampling.sede=1", "`--set sampling.sede`", "`seed`"),
    generate("set: wrong type", "--set sampling.seed=one", "`--set sampling.seed` must be a whole number"),
    generate("set: a section, hidden by a flag", "--set sampling=3 -n 4", "`--set sampling` must be a mapping"),
    generate("set: broken list", "--set sampling.stop=[a", "`--set sampling.stop` is not a value in YAML"),
    case("recipe copy over a file", "recipe copy builtin my.yaml", USAGE, "already exists", files={"my.yaml": "mine"}),
    case("recipe copy into no folder", "recipe copy builtin no/my.yaml", USAGE, "does not exist"),
    case("recipe copy of nothing", "recipe copy nothing", USAGE, "no recipe `nothing`"),
]

OUTPUT = [
    generate("output: exists", "--output out.json", "already exists", "--force", files={"out.json": "mine"}),
    generate("output: no folder", "--output no/out.json", "folder of `--output no/out.json` does not exist"),
    generate("output: a folder", "--output .", "is a folder"),
    generate("output: force alone", "--force", "`--force` has no effect without --output"),
    generate(
        "output: forced, but the model is missing",
        "--output out.json --force -t ./none --quiet",
        "`./none` does not exist",
        files={"out.json": "mine"},
    ),
]

AUDIT = "audit --quiet -t @/target"
OTHERS = [
    case("audit: no draft", AUDIT, USAGE, "there is no draft to audit"),
    case("audit: missing draft", f"{AUDIT} -d ./none", USAGE, "model folder `./none` does not exist"),
    case("audit: k negative", f"{AUDIT} -d ngram -k -1", USAGE, "`--num-speculative-tokens` must be at least 0"),
    case("audit: output exists", f"{AUDIT} --output o.json", USAGE, "already exists", files={"o.json": "mine"}),
    case("doctor: k negative", "doctor -k -1", USAGE, "`--num-speculative-tokens` must be at least 0"),
    case("doctor: output exists", "doctor --output o.json", USAGE, "already exists", files={"o.json": "mine"}),
]

CASES = [*MODELS, *NUMBERS, *CHOICES, *PROMPTS, *RECIPES, *OUTPUT, *OTHERS]
assert len({case.name for case in CASES}) == len(CASES), "every case has a name of its own"


def prepare(case: Case, sound: Path) -> list[str]:
    """Lay out a case's files here; its command line with the models' folder put in."""
    here = Path.cwd()
    for name, content in (case.files or {}).items():
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if case.make is not None:
        case.make(sound, here)
    return [word.replace("@/", f"{sound}/") for word in case.arguments]


@pytest.mark.in_turn(3, every=4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_clear_sentence(
    case: Case, sound: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = prepare(case, sound)
    for name, value in (case.environment or {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(case.stdin), encoding="utf-8"))
    before = contents(sound, Path.cwd())
    code = run(arguments)
    out, err = capsys.readouterr()
    assert code == case.code, err
    assert out == ""
    assert_one_sentence(err, *case.said)
    assert contents(sound, Path.cwd()) == before


def test_a_hub_that_cannot_be_reached_is_said_quickly(capsys: pytest.CaptureFixture[str]) -> None:
    run(["generate", "-t", "./none", "--quiet", "a"])  # torch and transformers are imported now
    capsys.readouterr()
    start = time.perf_counter()
    assert run(["generate", "-t", "nobody/none", "--quiet", "a"]) == RUN
    assert time.perf_counter() - start < 5
    out, err = capsys.readouterr()
    assert out == ""
    assert_one_sentence(err, "model `nobody/none`", "local folder")


@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").write_text("x")
    (tmp_path / "p.txt").chmod(0)
    assert run(["generate", "--prompt-file", str(tmp_path / "p.txt")]) == USAGE
    assert_one_sentence(capsys.readouterr().err, "cannot be read: Permission denied")


BOMB = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['x'] * 9)}]\n" for i in range(30))


def test_a_yaml_bomb_is_defused(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine to the thirtieth values if it went off; every alias is refused where it stands."""
    Path("bomb.yaml").write_text(BOMB)
    start = time.perf_counter()
    assert run(["generate", "-r", "bomb.yaml", "a"]) == USAGE
    assert time.perf_counter() - start < 5
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.rstrip("\n").split("\n")
    assert "error: bomb.yaml:2:10: alias `*a0` is not allowed in a recipe" in lines
    assert all(line.startswith("error: bomb.yaml:") for line in lines[:-2])
    assert lines[-1].startswith("hint: ")


def test_every_problem_of_a_recipe_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.yaml").write_text("sampling: {temperatur: 1, top_p: 2}\nengin: {}\n")
    assert run(["generate", "-r", "my.yaml", "a"]) == USAGE
    places = re.findall(r"^error: my\.yaml:(\d+:\d+): ", capsys.readouterr().err, re.MULTILINE)
    assert places == ["1:12", "1:34", "2:1"]


PLAIN = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}


def specdec(arguments: list[str | bytes], stdin: bytes | None = b"", **options) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "specdec_cli.cli.main", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, env=PLAIN, check=False, timeout=120, **options)


@pytest.mark.in_turn(1, every=4)
@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "said"),
    [
        (["generate", "-k", "-1", "a"], b"", USAGE, "must be at least 0"),
        (["generate", b"caf\xe9"], b"", USAGE, "not valid Unicode"),
        (["generate"], b"\xff\x41", USAGE, "standard input is not valid UTF-8"),
        (["generate", "--output", "out.json", "a"], b"", USAGE, "already exists"),
        (["generate", "--quiet", "-t", "./none", "a"], b"", USAGE, "`./none` does not exist"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_as_a_process(arguments, stdin: bytes, code, said: str) -> None:
    Path("out.json").write_text("mine")
    done = specdec(arguments, stdin)
    assert done.returncode == code
    assert done.stdout == b""
    assert_one_sentence(done.stderr.decode(), said)
    assert Path("out.json").read_text() == "mine"


def test_a_closed_standard_input() -> None:
    done = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -m specdec_cli.cli.main generate <&-"],
        capture_output=True,
        env=PLAIN,
        check=False,
        text=True,
    )
    assert done.returncode == USAGE
    assert_one_sentence(done.stderr, "there is no prompt")


def test_a_contradiction_is_refused_before_torch_is_imported() -> None:
    program = (
        "import sys; from specdec_cli.cli.main import run\n"
        "code = run(['generate', '--verify', 'greedy', '--temperature', '1', 'a'])\n"
        "sys.exit(9 if {'torch', 'transformers'} & set(sys.modules) else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=PLAIN, check=False, text=True)
    assert done.returncode == USAGE, done.stderr
