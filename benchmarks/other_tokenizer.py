"""A small draft with a tokenizer of its own for the built-in target: overlap, acceptance, exactness, overhead.

    python benchmarks/other_tokenizer.py [--text FILE] [--minutes 4] [--keep FOLDER]

The draft learns from a text of stories like those that the target was trained on (`--text`, parted by `<|endoftext|>`),
or else from some hundred that the target writes. A sentencepiece-like BPE (spaces before words, bytes for unknown
characters) is trained on them. The draft begins as the built-in one, each of its new tokens with the mean embedding of
its text in the old tokens, and is trained for some minutes on one core. It is measured beside the built-in draft, which
has the target's tokenizer: greedy and sampled, by text and by shared tokens. Every greedy output is compared with plain
decoding's. The host's own microseconds of translating a step are measured at growing contexts. No weights are kept
unless a folder is named.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import record
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import specdec_cli
from specdec_cli import Engine, SamplingParams
from specdec_cli.lm.load import load_tokenizer
from specdec_cli.text.shared_vocabulary import shared_vocabulary
from specdec_cli.text.tokenizer import Tokenizer as HouseTokenizer
from specdec_cli.text.translation import Translator

PROMPTS = Path(specdec_cli.__file__).parent / "measure" / "workload" / "prompts" / "stories.jsonl"
BEGINNINGS = ["Once upon a time", "One day", "There was a", "Lily", "Tom and", "The little", "In a small", "A big dog"]
SPECIAL = ["<unk>", "<s>", "</s>"]
WINDOW, BATCH = 128, 8


def written_by_target(num_stories: int) -> list[str]:
    """Stories that the target samples, all of different seeds."""
    engine = Engine.load("builtin:target", None, max_num_seqs=16)
    prompts = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(num_stories)]
    params = SamplingParams(max_new_tokens=160, temperature=0.8, seed=1)
    outputs = engine.generate(prompts, params)
    return [prompt + output.text for prompt, output in zip(prompts, outputs, strict=True)]


def stories_of(file: Path) -> list[str]:
    """The stories of a file."""
    return [story.strip() for story in file.read_text(encoding="utf-8").split("<|endoftext|>") if story.strip()]


def train_tokenizer(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A BPE as sentencepiece makes it: a space before every text, bytes for what it does not know."""
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split(Regex("▁+[^▁]*"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[*SPECIAL, *byte_names], show_progress=False)
    made.train_from_iterator(texts, trainer)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    state = json.loads(made.to_str())  # the trainer took the bytes for special tokens
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in SPECIAL]
    backend = Tokenizer.from_str(json.dumps(state))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def transplanted(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The built-in draft with embeddings for other tokens: each the mean of its text's in the draft's own tokens."""
    folder = Path(specdec_cli.__file__).parent / "builtin" / "draft"
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own, new = HouseTokenizer(load_tokenizer("builtin:draft")), HouseTokenizer(tokenizer)
    before = model.get_input_embeddings().weight.detach().clone()
    after = before.mean(0).repeat(len(tokenizer), 1)
    for token in range(len(tokenizer)):
        text = new.added_bytes(token, begins=False).decode("utf-8", "ignore")
        pieces = own.encode(text, False) if text else []
        if pieces:
            after[token] = before[pieces].mean(0)
    after[1:3] = before[[own.special_token("bos_token"), own.special_token("eos_token")]]
    config = LlamaConfig(**(model.config.to_dict() | {"vocab_size": len(tokenizer), "dtype": "float32"}))
    made = LlamaForCausalLM(config)
    kept = {name: value for name, value in model.state_dict().items() if value.shape == made.state_dict()[name].shape}
    made.load_state_dict(kept, strict=False)
    with torch.no_grad():
        made.get_input_embeddings().weight.copy_(after)
        made.tie_weights()
    return made


def train_draft(texts: list[str], tokenizer: PreTrainedTokenizerFast, minutes: float) -> tuple[Any, dict[str, Any]]:
    """A small Llama over the tokenizer, trained for some minutes, and how that went."""
    torch.manual_seed(0)
    model = transplanted(tokenizer)
    flat = torch.tensor([token for text in texts for token in [*tokenizer.encode(text), 2]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, weight_decay=0.05)
    begin, num_steps, losses = perf_counter(), 0, list[float]()
    while (done := (perf_counter() - begin) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1, (num_steps + 1) / 50) * (1 - 0.95 * done)
        starts = torch.randint(0, len(flat) - WINDOW - 1, (BATCH,))
        ids = torch.stack([flat[start : start + WINDOW] for start in starts])
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        num_steps, losses = num_steps + 1, [*losses[-49:], loss.item()]
    seen = num_steps * BATCH * WINDOW
    about = {"parameters": sum(p.numel() for p in model.parameters()), "tokens_of_text": len(flat), "tokens_seen": seen}
    return model.eval(), about | {"nats_per_token": round(float(np.mean(losses)), 3), "minutes": minutes}


def measure(draft: Any, prompts: list[str], plain: list[list[int]], temperature: float, k: int) -> dict[str, Any]:
    """Acceptance and speed of a draft over prompts, and outputs that differ from plain decoding's at temperature 0."""
    engine = Engine.load("builtin:target", draft, num_speculative_tokens=k, max_num_seqs=1)
    params = SamplingParams(max_new_tokens=96, temperature=temperature, seed=7)
    outputs = [engine.generate(prompt, params)[0] for prompt in prompts]
    counts = [output.speculative for output in outputs]
    num_steps = sum(one.num_steps for one in counts)
    num_drafted = sum(one.num_draft_tokens for one in counts)
    different = sum(one.token_ids != other for one, other in zip(outputs, plain, strict=True))
    shared = engine.drafter.shared_vocabulary
    return {
        "temperature": temperature,
        "acceptance_rate": round(sum(one.num_accepted_tokens for one in counts) / num_drafted, 4),
        "acceptance_length": round(sum(one.num_emitted_tokens for one in counts) / num_steps, 3),
        "drafted_per_step": round(num_drafted / num_steps, 2),
        "draft_ms_per_step": round(1e3 * sum(one.draft_seconds for one in counts) / num_steps, 2),
        "outputs_that_differ": different if temperature == 0 else None,
        "share_of_output_shared": None
        if shared is None
        else round(shared.share_of(o.token_ids for o in outputs) or 0, 4),
    }


def translation_overhead(translator: Translator, text: str) -> list[dict[str, float]]:
    """The host's time to bring a context up to date and to encode a guess back, by length of the context."""
    tokens = translator.target.encode(text, False)
    rows = []
    for length in (100, 1000, 10_000):
        context = (tokens * (length // len(tokens) + 2))[: length + 200]
        translation = translator.start()
        begin = perf_counter()
        translation.follow(context[:length])
        first = perf_counter() - begin
        guess = translator.draft.encode(text, False)[5:11]
        follow, back = [], []
        for end in range(length + 3, length + 200, 3):
            begin = perf_counter()
            translation.follow(context[:end])
            middle = perf_counter()
            translator.guessed(translation, guess)
            follow.append(middle - begin)
            back.append(perf_counter() - middle)
        times = {"prompt_ms": 1e3 * first, "follow_us": 1e6 * np.median(follow), "guess_us": 1e6 * np.median(back)}
        rows.append({"context": length, **{name: round(float(value), 1) for name, value in times.items()}})
    return rows


def main() -> None:
    """Train, measure and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--stories", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    before = record.machine()
    texts = written_by_target(options.stories) if options.text is None else stories_of(options.text)
    print(f"{len(texts)} stories", flush=True)
    hf = train_tokenizer(texts[:2000], options.vocabulary)
    model, trained = train_draft(texts, hf, options.minutes)
    print(json.dumps(trained), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        model.save_pretrained(folder)
        hf.save_pretrained(folder)
        source = "the target's own" if options.text is None else options.text.name
        results = {"training": {"text": source, **trained}, **measured(str(folder), options.num_prompts, options.k)}
    print(record.save("other_tokenizer", before, results))


def measured(folder: str, num_prompts: int, k: int) -> dict[str, Any]:
    """Everything about a trained draft."""
    target, draft = HouseTokenizer(load_tokenizer("builtin:target")), HouseTokenizer(load_tokenizer(folder))
    shared = shared_vocabulary(target, draft)
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()][:num_prompts]
    engine = Engine.load("builtin:target", None, max_num_seqs=1)
    plain = [engine.generate(prompt, SamplingParams(max_new_tokens=96))[0].token_ids for prompt in prompts]
    drafts: dict[str, Any] = {
        "builtin:draft": "builtin:draft",
        "by text": {"method": "universal", "model": folder, "match": "text"},
        "by intersection": {"method": "universal", "model": folder, "match": "intersection"},
    }
    arms = [
        {"draft": name, **measure(fields, prompts, plain, temperature, k)}
        for name, fields in drafts.items()
        for temperature in (0.0, 1.0)
    ]
    for arm in arms:
        print(json.dumps(arm), flush=True)
    overhead = translation_overhead(Translator(target, draft, shared), engine.tokenizer.decode(plain[0]))  # type: ignore[union-attr]
    return {"k": k, "overlap": shared.result().as_json(), "arms": arms, "translation": overhead}


if __name__ == "__main__":
    main()
