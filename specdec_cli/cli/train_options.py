"""The options of `specdec train-draft`: one for each key of a recipe's `train` section."""

from __future__ import annotations

from specdec_cli.cli.options import Option, prompt_file_option

METHOD, SCHEDULE, DRAFT = "Method and data", "Schedule", "Draft"

TRAIN_OPTIONS: tuple[Option, ...] = (
    Option("train.method", str, ("--method",), METHOD, metavar="eagle3|dflash|pard|medusa|distill"),
    Option("train.data", str, ("--data", "--dataset"), METHOD, metavar="NAME|FILE"),
    prompt_file_option("train.data", METHOD),
    Option("train.num_prompts", int, ("--num-prompts",), METHOD, default="all"),
    Option("train.num_held_out", int, ("--num-held-out",), METHOD),
    Option("train.answers_per_prompt", int, ("--answers-per-prompt",), METHOD),
    Option("train.keep_answers", bool, ("--keep-answers/--no-keep-answers",), METHOD),
    Option("train.cache_features", bool, ("--cache-features/--no-cache-features",), METHOD),
    Option("train.epochs", int, ("--epochs",), SCHEDULE),
    Option("train.max_steps", int, ("--max-steps",), SCHEDULE),
    Option("train.batch_size", int, ("--batch-size",), SCHEDULE),
    Option("train.learning_rate", float, ("--learning-rate",), SCHEDULE, default="by the target's width"),
    Option("train.warmup_ratio", float, ("--warmup-ratio",), SCHEDULE),
    Option("train.weight_decay", float, ("--weight-decay",), SCHEDULE),
    Option("train.max_grad_norm", float, ("--max-grad-norm",), SCHEDULE),
    Option("train.evaluate_every", int, ("--evaluate-every",), SCHEDULE, metavar="STEPS"),
    Option("train.save_every", int, ("--save-every",), SCHEDULE, metavar="STEPS"),
    Option("train.patience", int, ("--patience",), SCHEDULE),
    Option("train.seed", int, ("--train-seed",), SCHEDULE),
    Option("train.loss", str, ("--loss",), DRAFT, metavar="kl|ce|tv|hybrid"),
    Option("train.depth", int, ("--depth",), DRAFT),
    Option("train.depth_decay", float, ("--depth-decay",), DRAFT),
    Option("train.layers", str, ("--layers",), DRAFT, metavar="A-B-C"),
    Option("train.draft_vocab_size", int, ("--draft-vocab-size",), DRAFT),
    Option("train.intermediate_size", int, ("--intermediate-size",), DRAFT),
    Option("train.hidden_size", int, ("--hidden-size",), DRAFT),
    Option("train.num_attention_heads", int, ("--num-attention-heads",), DRAFT),
    Option("train.num_key_value_heads", int, ("--num-key-value-heads",), DRAFT),
    Option("train.num_layers", int, ("--num-layers",), DRAFT),
    Option("train.num_anchors", int, ("--num-anchors",), DRAFT),
    Option("train.sample_from_anchor", bool, ("--sample-from-anchor/--no-sample-from-anchor",), DRAFT),
    Option("train.mask_token", int, ("--mask-token",), DRAFT),
    Option("train.start_from", str, ("--start-from",), DRAFT, metavar="MODEL"),
)
