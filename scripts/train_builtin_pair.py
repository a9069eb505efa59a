"""Train the built-in pair: one tokenizer, a deep narrow target and a shallow draft distilled from it.

The weights inside `specdec_cli/builtin/` came from this file. How they began, which is not as here, is in their model
card: the target is a narrower one that `widen` trained on, with `--initial`. Run the stages in order; each one can be
stopped and run again, and goes on from its last checkpoint:

    python scripts/train_builtin_pair.py tokenizer --text STORIES.txt --work WORK
    python scripts/train_builtin_pair.py target    --text STORIES.txt --work WORK --max-steps 4000
    python scripts/train_builtin_pair.py draft     --text STORIES.txt --work WORK --max-steps 1000
    python scripts/train_builtin_pair.py continue  --text STORIES.txt --work WORK --num-texts 12288
    python scripts/train_builtin_pair.py polish    --text STORIES.txt --work WORK --max-steps 3200
    python scripts/train_builtin_pair.py pack      --work WORK --out specdec_cli/builtin

STORIES.txt holds stories separated by a line `<|endoftext|>`. Needs the extra `train`. A step of the target takes two
CPU cores about three seconds, one of the draft one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from specdec_cli import Engine, EngineOptions, SamplingParams

VOCABULARY = 2048
CONTEXT = 512
NUM_HELD_OUT_STORIES = 300
SPECIAL = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPES = {
    "target": {"hidden_size": 160, "num_hidden_layers": 14, "num_attention_heads": 5, "intermediate_size": 1280},
    "draft": {"hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 432},
}
REQUESTS = [
    "Tell me a story about {}.",
    "Write a short story about {}.",
    "Can you tell a story with {}?",
    "I want to hear a story about {}.",
    "Please write a story about {}.",
]


def read_stories(path: Path) -> list[str]:
    """The stories of a text file, in a fixed shuffled order."""
    stories = [s.strip() for s in path.read_text(encoding="utf-8").split("<|endoftext|>")]
    stories = [s for s in stories if len(s) > 100]
    random.Random(0).shuffle(stories)
    return stories


def train_tokenizer(stories: list[str], folder: Path) -> None:
    """Train a byte-level BPE of VOCABULARY tokens and save it with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        stories,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def story_words(stories: list[str]) -> Counter[str]:
    """How many stories contain each lower-case word of at least four letters."""
    counts: Counter[str] = Counter()
    for story in stories:
        counts.update(set(re.findall(r"\b[a-z]{4,}\b", story)))
    return counts


def as_chat(story: str, counts: Counter[str], rng: random.Random) -> str:
    """A user's request for the story by two of its telling words, then the story."""
    words = sorted({w for w in re.findall(r"\b(?:a|the) ([a-z]{4,})\b", story) if 20 <= counts[w] <= 1200})
    topic = " and ".join(f"a {w}" for w in rng.sample(words, min(len(words), rng.choice([1, 1, 2])))) or "a friend"
    return f"<|user|>{rng.choice(REQUESTS).format(topic)}<|assistant|>{story}"


def write_continuations(stories: list[str], work: Path, num_texts: int, together: int = 64) -> None:
    """The target's own texts from beginnings of training stories: what a draft meets when it decodes.

    Two of three are greedy, one is drawn at temperature 1. Adds to `continuations.jsonl`, `together` at a time, so that
    a stopped run goes on where it was.
    """
    engine = Engine.load(str(work / "target"), "none", options=EngineOptions(max_num_seqs=together))
    path, counts = work / "continuations.jsonl", story_words(stories)
    done = sum(1 for _ in path.open(encoding="utf-8")) if path.exists() else 0
    for first in range(done, num_texts, together):
        rng = random.Random(first)
        prompts, params = [], []
        for number in range(first, min(first + together, num_texts)):
            story = stories[number % len(stories)]
            if rng.random() < 0.15:
                prompts.append(engine.encode(as_chat(story, counts, rng).split("<|assistant|>")[0] + "<|assistant|>"))
            else:
                prompts.append(engine.encode(story)[: rng.randrange(4, 40)])
            params.append(SamplingParams(max_new_tokens=180, temperature=float(number % 3 == 2), seed=number))
        outputs = engine.generate(prompts, params)
        with path.open("a", encoding="utf-8") as file:
            for prompt, output in zip(prompts, outputs, strict=True):
                file.write(json.dumps([*prompt, *output.token_ids]) + "\n")


class Packed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Stories laid end to end and cut into rows of CONTEXT tokens; each epoch cuts elsewhere."""

    def __init__(
        self, stories: list[str], tokenizer: Any, chat_share: float, continuations: list[list[int]] | None = None
    ) -> None:
        rng, counts = random.Random(1), story_words(stories)
        texts = [as_chat(s, counts, rng) if rng.random() < chat_share else s for s in stories]
        eos = tokenizer.eos_token_id
        rows = [[*row, eos] for row in tokenizer(texts, add_special_tokens=True)["input_ids"]] if texts else []
        rows += continuations or []
        rng.shuffle(rows)
        self.ids = torch.tensor([token for row in rows for token in row])
        self.rng = random.Random(2)

    def __len__(self) -> int:
        return len(self.ids) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = min(index * CONTEXT + self.rng.randrange(CONTEXT), len(self.ids) - CONTEXT)
        row = self.ids[start : start + CONTEXT]
        return {"input_ids": row, "labels": row}


class Fixed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Held-out stories in rows of CONTEXT tokens, always the same."""

    def __init__(self, stories: list[str], tokenizer: Any) -> None:
        self.ids = Packed(stories, tokenizer, chat_share=0.0).ids

    def __len__(self) -> int:
        return len(self.ids) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.ids[index * CONTEXT : (index + 1) * CONTEXT]
        return {"input_ids": row, "labels": row}


class TaughtTrainer(Trainer):  # type: ignore[misc]
    """Trainer whose loss is in part the divergence from a teacher, and the rest the text's own loss."""

    def __init__(self, *args: Any, teacher: torch.nn.Module | None, share: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher
        self.share = share

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A share of KL(teacher || student), else cross entropy, in nats per token; evaluation keeps the latter."""
        output = model(**inputs)
        if self.teacher is None or not model.training:
            return (output.loss, output) if return_outputs else output.loss
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            teacher = self.teacher(input_ids=inputs["input_ids"]).logits
        divergence = torch.nn.functional.kl_div(
            output.logits.float().log_softmax(-1).flatten(0, 1),
            teacher.float().log_softmax(-1).flatten(0, 1),
            log_target=True,
            reduction="batchmean",
        )
        loss = self.share * divergence + (1 - self.share) * output.loss
        return (loss, output) if return_outputs else loss


def arguments(folder: Path, max_steps: int, learning_rate: float) -> TrainingArguments:
    """Training arguments shared by both models."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=max_steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=100,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        logging_steps=20,
        save_steps=200,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=400,
        prediction_loss_only=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=0,
    )


def new_model(name: str) -> LlamaForCausalLM:
    """A freshly initialised model of SHAPES[name]."""
    torch.manual_seed(0)
    shape = SHAPES[name]
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            num_key_value_heads=shape["num_attention_heads"],
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=None,
            initializer_range=0.04,
            attn_implementation="sdpa",
            **shape,
        )
    )


def widened(narrow: Any) -> LlamaForCausalLM:
    """A target that says what a narrower one does: its further feed-forward units have no output yet."""
    model, before = new_model("target"), narrow.state_dict()
    for name, weight in model.state_dict().items():
        if "down_proj" in name:
            weight.zero_()
        weight[tuple(map(slice, before[name].shape))] = before[name]
    return model


def draft_from_target(work: Path) -> LlamaForCausalLM:
    """A draft that begins as some of the target's layers, the first and the last among them."""
    target = AutoModelForCausalLM.from_pretrained(work / "target", dtype=torch.float32).state_dict()
    model, last = new_model("draft"), SHAPES["target"]["num_hidden_layers"] - 1
    gap = last / (SHAPES["draft"]["num_hidden_layers"] - 1)
    weights = model.state_dict()
    for name in weights:
        source = re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{round(int(match[1]) * gap)}.", name)
        weights[name] = target[source]
    model.load_state_dict(weights)
    return model


@dataclass(frozen=True)
class Stage:
    """The model to train, its highest learning rate, and the weight of the divergence from a teacher in its loss."""

    name: str
    learning_rate: float
    share: float


STAGES = {
    "target": Stage("target", 2e-3, 0.0),
    "widen": Stage("target", 5e-4, 0.5),
    "draft": Stage("draft", 4e-3, 0.9),
    "polish": Stage("draft", 2e-3, 0.9),
}


def train(stage: str, stories: list[str], work: Path, options: argparse.Namespace) -> None:
    """Train the target, or a narrower one on; distil the draft from it on stories, or on its own texts too."""
    plan, initial = STAGES[stage], options.initial
    name = plan.name
    if stage == "polish" and initial is None:
        initial = work / "draft"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    held_out, rest = stories[:NUM_HELD_OUT_STORIES], stories[NUM_HELD_OUT_STORIES:]
    begun = None if initial is None else AutoModelForCausalLM.from_pretrained(initial, dtype=torch.float32)
    if stage == "widen":
        model, teacher = widened(begun), begun
    else:
        model = begun or (new_model("target") if stage == "target" else draft_from_target(work))
        is_taught = plan.share > 0
        teacher = AutoModelForCausalLM.from_pretrained(work / "target", dtype=torch.float32) if is_taught else None
    folder = work / f"{stage}-run"
    own_texts: list[list[int]] = []
    if stage == "polish":
        own_texts = [json.loads(line) for line in (work / "continuations.jsonl").open(encoding="utf-8")]
        rest = rest[: len(own_texts) // 4]
    trainer = TaughtTrainer(
        teacher=teacher,
        share=plan.share,
        args=arguments(folder, options.max_steps, options.learning_rate or plan.learning_rate),
        model=model,
        train_dataset=Packed(rest, tokenizer, 0.2, own_texts),
        eval_dataset=Fixed(held_out, tokenizer),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    loss = trainer.evaluate()["eval_loss"]
    model.generation_config.do_sample = False
    model.save_pretrained(work / name)
    tokenizer.save_pretrained(work / name)
    tokens = trainer.state.global_step * 8 * CONTEXT
    if initial is not None and (initial / "training.json").exists():
        tokens += json.loads((initial / "training.json").read_text(encoding="utf-8"))["training_tokens"]
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens": tokens,
        "steps": trainer.state.global_step,
        "held_out_stories": NUM_HELD_OUT_STORIES,
        "loss_nats_per_token": round(loss, 4),
        "perplexity": round(math.exp(loss), 3),
    }
    (work / name / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts))


CARD = """# The built-in pair

`builtin:target` and `builtin:draft`: two small Llama-shaped models that write simple children's stories in English, so
that every command of specdec works without a model hub. Trained from scratch for this project, tokenizer included, by
`scripts/train_builtin_pair.py`, which anyone can run again.

| | target | draft |
|---|---|---|
| layers × width (heads, feed-forward) | {target_shape} | {draft_shape} |
| parameters | {target[parameters]:,} | {draft[parameters]:,} |
| training tokens seen | {target[training_tokens]:,} | {draft[training_tokens]:,} |
| nats per token on {held_out} held-out stories | {target[loss_nats_per_token]} | {draft[loss_nats_per_token]} |
| perplexity there | {target[perplexity]} | {draft[perplexity]} |

- **Tokenizer**: byte-level BPE of {vocabulary} tokens, trained on the same stories. Context {context} tokens.
- **Weights**: rounded to bfloat16 as they lie here, half as large; computed with in float32, as the configuration says.
- **Data**: 10.8 thousand stories of TinyStories (Eldan and Li 2023, roneneldan/TinyStories, CDLA-Sharing-1.0), of which
  {held_out} were held out. One story in five was shown behind a request in the chat template
  (`<|user|>…<|assistant|>…`), which is all the chat that the models know. The text itself is not part of this package.
- **Training**: AdamW, cosine schedule, bf16 autocast on two CPU cores. The draft was distilled from the target
  (0.9 KL + 0.1 cross entropy), first on the stories, then on the target's own texts as well.{note}
- **Use**: trying specdec, tests, demonstrations. The models know nothing but small stories, may repeat themselves, and
  have had no safety training.
- **Licence**: the weights and the tokenizer are Apache-2.0, like the package.
"""


def shape_words(name: str) -> str:
    """A model's shape for the card."""
    shape = SHAPES[name]
    heads, wide = shape["num_attention_heads"], shape["intermediate_size"]
    return f"{shape['num_hidden_layers']} × {shape['hidden_size']} ({heads}, {wide})"


def pack(work: Path, out: Path, note: str) -> None:
    """Copy the finished pair into the package, its weights rounded to bfloat16, and write its model card."""
    facts = {}
    for name in SHAPES:
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted((work / name).iterdir()):
            if file.suffix == ".safetensors":
                weights = {key: weight.bfloat16() for key, weight in load_file(file).items()}
                save_file(weights, folder / file.name, {"format": "pt"})
            elif file.name != "training.json" and file.suffix in {".json", ".jinja"}:
                shutil.copyfile(file, folder / file.name)
            else:
                continue
            (folder / file.name).chmod(0o644)
        facts[name] = json.loads((work / name / "training.json").read_text(encoding="utf-8"))
    card = CARD.format(
        **facts,
        target_shape=shape_words("target"),
        draft_shape=shape_words("draft"),
        vocabulary=VOCABULARY,
        context=CONTEXT,
        held_out=NUM_HELD_OUT_STORIES,
        note=f" {note}" if note else "",
    )
    (out / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def main() -> None:
    """Parse the stage and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["tokenizer", "continue", "pack", *STAGES])
    parser.add_argument("--text", type=Path, help="stories separated by <|endoftext|>")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("specdec_cli/builtin"))
    parser.add_argument("--max-steps", type=int, default=4000)
    parser.add_argument("--num-texts", type=int, default=12288, help="texts that `continue` writes")
    parser.add_argument("--initial", type=Path, help="start from these weights instead of random ones")
    parser.add_argument("--learning-rate", type=float, help="the highest one, instead of the stage's own")
    parser.add_argument("--note", default="", help="a sentence for the model card")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    if options.stage == "widen" and options.initial is None:
        parser.error("widen needs --initial, the narrower target")
    torch.set_num_threads(options.threads)
    if options.stage == "pack":
        pack(options.work, options.out, options.note)
        return
    stories = read_stories(options.text)
    if options.stage == "tokenizer":
        train_tokenizer(stories[NUM_HELD_OUT_STORIES:], options.work / "tokenizer")
    elif options.stage == "continue":
        write_continuations(stories[NUM_HELD_OUT_STORIES:], options.work, options.num_texts)
    else:
        train(options.stage, stories, options.work, options)


if __name__ == "__main__":
    main()
