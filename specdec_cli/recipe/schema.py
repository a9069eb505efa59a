"""The schema of recipes: sections, keys, types and ranges, each with the description that help and schema show.

A section is one class; a new one is that class and one line in `Recipe`.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec_cli.document import absent
from specdec_cli.drafted import MOST_DEPTH
from specdec_cli.errors import UsageError
from specdec_cli.recipe import values
from specdec_cli.verification import AUTO, RULES

OF_ONE_TARGET = ("generation_config", "chat_template", "default_chat_template_kwargs")
"""Keys of a recipe's target that mean nothing for another model."""

DEFAULT_TARGET = "builtin:target"
DEFAULT_DRAFT = "builtin:draft"
DEFAULT_DRAFT_QUANTIZE: Final = "int8"
DEFAULT_PAIR_K = 5
"""Settings of the built-in pair if no model is named, as in the recipe `builtin`."""

_MOST_SEQUENCES = 4096  # in a batch, of decoding as of training


class Section(BaseModel):
    """A mapping of a recipe: unknown keys, wrong types and NaN are refused; nothing is converted."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        defer_build=True,  # `--help` needs no validators
    )


class LoadedModel(Section):
    """A model and how it is loaded."""

    model: str | None = Field(None, min_length=1)
    """Hub id, local folder or built-in (`builtin:target`, `builtin:draft`)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    load_format: values.LoadFormat = "auto"
    """Weights: auto (the model's files), or dummy (random numbers, also for the draft of a dummy; reads no files)."""
    dtype: values.Dtype = "auto"
    """Data type of the weights: auto (the checkpoint's own), float32, bfloat16 or float16."""
    quantize: values.Quantize = "none"
    """Quantize linear layers when loading: none, int8, or int4 (blocks of 32; embeddings and head in 8 bits)."""
    compute: values.Compute = "auto"
    """How quantized weights are used: native (in blocks), dequantized, or auto (native if possible)."""
    device: values.Device = "auto"
    """Where the model runs: auto, cpu, cuda or cuda:N."""
    tensor_parallel_size: values.ParallelSize = 1
    """Devices for the model. More than 1 is for `--engine vllm` and `specdec export`; specdec uses one device."""


MODEL_KEYS = tuple(key for key in LoadedModel.model_fields if key != "model")
"""Keys that say how a model is loaded; without meaning where a draft is no model."""


class Target(LoadedModel):
    """The model whose output you want."""

    model: str = Field(DEFAULT_TARGET, min_length=1)
    """Hub id, local folder or built-in (`builtin:target`)."""
    pipeline_parallel_size: values.ParallelSize = 1
    """Pipeline stages for the model. More than 1 is for `--engine vllm` and `specdec export`."""
    generation_config: str = Field("auto", min_length=1)
    """Source of end tokens, and of sampling defaults in serve: auto (the model's file), none, or a folder."""
    chat_template: str | None = Field(None, min_length=1)
    """Chat template, or a file that contains it, instead of the tokenizer's own."""
    default_chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, unless a request sets them."""


class Draft(LoadedModel):
    """The draft: a smaller `model`, or a `method` with its options as further keys."""

    model_config = ConfigDict(extra="allow")

    method: str | None = Field(None, min_length=1)
    """Drafting method; none decodes without a draft."""
    first: str | None = Field(None, min_length=1)
    """Draft without a model that is asked first, such as suffix; this one drafts where it has nothing."""

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options."""
        return dict(self.model_extra or {})

    def behind_first(self, name: str) -> str:
        """A name of the draft behind that of `first`, if any: `suffix+NAME`."""
        return name if self.first is None else f"{self.first}+{name}"


class Speculation(Section):
    """How many tokens to draft, and how they are verified."""

    num_speculative_tokens: int = Field(4, ge=0, le=MOST_DEPTH)
    """k, the maximum number of tokens to draft in a step. 0 decodes without a draft."""
    depth_policy: Literal["fixed", "confidence", "adaptive", "heuristic"] = "fixed"
    """How many tokens to draft: k (fixed), fewer when the draft is unsure (confidence), as many as pay (adaptive), or
    two more after a fully accepted draft and one less after any other, at most k (heuristic)."""
    p_min: float = Field(0.4, ge=0, le=1)
    """Stop drafting when the draft's largest probability is below this (with depth policy confidence)."""
    tree: values.TreeText = None
    """Draft trees, at most k deep: children per depth (4,2,1 or 3,2+1 by node) or the likeliest nodes (dynamic:32)."""
    verify: values.Verify = Field(
        AUTO, description=f"auto (greedy at temperature 0, else block or a tree's rule), {', '.join(RULES)}."
    )
    synthetic_acceptance_length: float | None = absent(ge=1, le=65)
    """Accept tokens with one probability α (lossy) so that a step gives 1 + α + ... + α^k = this many tokens."""
    synthetic_acceptance_rates: values.AcceptanceRates | None = absent()
    """Accept at random (lossy): the rate at which each position and all before it are accepted, as in vLLM."""
    disable_by_batch_size: int | None = Field(None, ge=1, le=2**20)
    """Do not speculate while more than this many sequences run."""
    k_by_batch: values.KSchedule = None
    """k by the number of running sequences, such as 1:5,8:3,32:0 (k = 5 from 1 sequence on, 3 from 8, none from 32)."""
    k_by_context: values.KSchedule = None
    """Largest k by the tokens of the context, such as 4000:2,16000:0 (k = 2 from 4000 tokens on, none from 16000)."""

    @property
    def is_synthetic(self) -> bool:
        """Whether given chances decide what is accepted, and not the target."""
        return self.synthetic_acceptance_length is not None or self.synthetic_acceptance_rates is not None

    @property
    def least_confidence(self) -> float:
        """Probability of its token below which a draft ends; 0 where it never does."""
        return self.p_min if self.depth_policy == "confidence" else 0.0


class Sampling(Section):
    """How tokens are sampled and when an output ends; the fields of SamplingParams."""

    max_new_tokens: int = Field(128, ge=1, le=2**31 - 1)
    """Maximum number of tokens to generate."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature. 0 is greedy."""
    top_k: int | None = Field(None, ge=1, le=2**31 - 1)
    """Sample from the k most likely tokens."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities add up to this."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Drop tokens less likely than this fraction of the most likely one."""
    repetition_penalty: float = Field(1.0, ge=0.0001, le=10000)
    """Penalize (above 1) or favour (below 1) tokens of the prompt and the output."""
    presence_penalty: float = Field(0.0, ge=-10000, le=10000)
    """Subtract this from the logit of each token that occurs in the output."""
    frequency_penalty: float = Field(0.0, ge=-10000, le=10000)
    """Subtract this from a token's logit for each of its occurrences in the output."""
    logit_bias: values.LogitBias = Field(default_factory=dict)
    """Add a number to the logit of a token id."""
    stop: values.Texts = ()
    """Texts that end the output. They are not part of it."""
    stop_token_ids: values.TokenIds = ()
    """Token ids that end the output, in addition to the model's end tokens."""
    ignore_eos: bool = False
    """Do not stop at the model's end tokens."""
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    """Minimum number of tokens before anything ends the output."""
    skip_special_tokens: bool = True
    """Leave special tokens such as <|im_end|> out of the text."""
    seed: int = Field(0, ge=-(2**63), le=2**63 - 1)
    """Random seed. A negative one, such as -1, picks a seed at random."""
    logprobs: int | None = Field(None, ge=0, le=100)
    """Report log-probabilities of the output's tokens and of this many alternatives, under the target."""


class Structured(Section):
    """Constraints on the output; at most one of these keys."""

    json_schema: dict[str, Any] | str | None = None
    """Restrict the output to a JSON Schema, given as text or file."""
    regex: str | None = Field(None, min_length=1)
    """Restrict the output to a regular expression (Rust syntax), which must match all of it."""
    choice: values.Texts = ()
    """Restrict the output to one of these texts."""

    @property
    def given(self) -> dict[str, Any]:
        """The keys that ask for something."""
        return {key: value for key, value in self.model_dump(mode="json").items() if value not in (None, [])}

    @property
    def is_given(self) -> bool:
        """Whether outputs must match anything."""
        return bool(self.given)


class EngineSection(Section):
    """Sizes of the engine: batch, context, KV cache."""

    model_config = ConfigDict(title="Engine")

    name: Literal["specdec", "vllm", "llamacpp"] = "specdec"
    """Engine that decodes: specdec, or an installed vLLM or llama.cpp, whose server is started as a subprocess."""
    distributed_executor_backend: Literal["mp", "ray", "uni", "external_launcher"] | None = None
    """How another engine runs on several devices or machines, such as mp or ray; it chooses by default."""
    start_timeout_seconds: float = Field(600.0, gt=0)
    """How long another engine may take until it answers."""
    max_num_seqs: int = Field(8, ge=1, le=_MOST_SEQUENCES)
    """Maximum number of sequences in a batch."""
    max_model_len: int | None = Field(None, ge=2, le=2**24)
    """Maximum context length, at most the target's own limit."""
    kv_block_size: int = Field(16, ge=1, le=1024)
    """Tokens per block of the KV cache."""
    kv_cache_memory: values.Memory = "auto"
    """Memory for the KV cache: auto, bytes such as 2GiB, or a share such as 90% for weights and KV."""
    max_num_batched_tokens: int = Field(2048, ge=1, le=2**24)
    """Maximum number of prompt tokens in one step."""
    enable_prefix_caching: bool | None = None
    """Compute common prefixes of prompts only once. On by default in serve and chat only."""
    decoder: values.Decoder = "auto"
    """Forward pass: auto (own on a CPU, graphs on a GPU, where supported), transformers, or graphs (CUDA graphs)."""
    check_at_load: bool = True
    """Compare the logits of each loaded model with transformers' own forward pass, and refuse a model that differs."""

    def memory_share(self) -> float | None:
        """Share of the device's memory (on a CPU: of the free RAM) for weights and KV cache, or None if not a share."""
        return values.memory_share(self.kv_cache_memory)

    def kv_cache_bytes(self, memory_bytes: int | None = None, weights_bytes: int = 0) -> int | None:
        """Bytes for the KV cache, or None for auto.

        Args:
            memory_bytes: the device's memory (on a CPU: the RAM that was free before loading); a share needs it.
            weights_bytes: what the weights on that device take of the share.

        Raises:
            UsageError: a share that the weights already fill, or a share where the memory is not known.
        """
        share = self.memory_share()
        if share is None:
            return None if self.kv_cache_memory == "auto" else values.memory_size(self.kv_cache_memory)
        if memory_bytes is None:
            raise UsageError(
                f"`{self.kv_cache_memory}` of the memory cannot be computed: the device's memory is not known",
                "give engine.kv_cache_memory as bytes such as 2GiB",
            )
        left = int(share * memory_bytes) - weights_bytes
        if left <= 0:
            raise UsageError(
                f"`{self.kv_cache_memory}` of the memory leaves nothing for the KV cache beside the weights",
                "raise engine.kv_cache_memory (--gpu-memory-utilization), or give bytes such as 2GiB",
            )
        return left


class WorkloadSection(Section):
    """The prompts to measure."""

    model_config = ConfigDict(title="Workload")

    dataset: str = Field("builtin:mini", min_length=1)
    """Data set of prompts: builtin:mini, builtin:stories, a preset (mt-bench, gsm8k, ...), a file, folder or hub id."""
    tasks: values.Tasks = None
    """Use only these tasks (categories) of the data set."""
    num_prompts: int = Field(24, ge=1, le=2**31 - 1)
    """Maximum number of prompts, spread evenly over the tasks."""


class Gates(Section):
    """Conditions under which a measurement fails with exit code 3."""

    fail_if: values.GateTexts = ()
    """Fail if this holds: PATH OP NUMBER such as speedup.decode < 1.2, or with several drafts
    rows.builtin:draft.speedup < 1.2, judged on whole intervals; or PATH == VERDICT (or !=) such as
    recommended.verdict == inconclusive."""
    baseline: str | None = Field(None, min_length=1)
    """Compare with an earlier result (JSON) and fail on a regression."""
    max_regression: values.Percentage = "5%"
    """Allowed regression against the baseline. Fails only if the whole interval lies beyond it."""


class Serve(Section):
    """The HTTP server: address, limits, logs and metrics."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on. Addresses beyond loopback require an API key."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on. 0 picks a free one."""
    api_key_env: str = Field("SPECDEC_API_KEY", min_length=1)
    """Environment variable with the API keys, separated by commas."""
    served_model_name: values.Names = ()
    """Names of the model in the API. Requests may use any of them; responses carry the first."""
    max_waiting: int = Field(256, ge=0, le=2**20)
    """Maximum number of waiting requests. Further ones get a 429."""
    max_connections: int = Field(1024, ge=1, le=2**20)
    """Maximum number of open connections. Requests on further ones get a 503."""
    max_queue_delay_microseconds: int = Field(0, ge=0, le=10**7)
    """How long an idle server waits for more requests before it starts a batch."""
    request_timeout_seconds: values.Seconds | None = 600.0
    """Time limit for a request, from arrival to the end of the response. null for none."""
    drain_timeout_seconds: values.Seconds = 30.0
    """How long running requests may continue after SIGTERM."""
    hang_timeout_seconds: values.Seconds = 120.0
    """/health returns 503 while a step takes longer than this."""
    ping_interval_seconds: values.Seconds = 15.0
    """Send a comment line on streams that have been silent for this long, to keep them open."""
    stream_interval: int | None = Field(None, ge=1, le=2**20)
    """Tokens per chunk of a stream. null sends one chunk per step."""
    cors_origins: values.Texts = ()
    """Origins whose web pages may call the server. None by default."""
    allowed_hosts: values.Texts = ()
    """Names to accept in the Host header, in addition to loopback names."""
    max_body_bytes: int = Field(4 * 2**20, ge=1024, le=2**30)
    """Maximum size of a request body."""
    max_choices: int = Field(64, ge=1, le=4096)
    """Maximum number of choices in a request (prompts × n)."""
    max_logprobs: int = Field(20, ge=0, le=100)
    """Maximum number of alternative tokens with log-probabilities that a request may ask for."""
    max_stop: int = Field(16, ge=0, le=4096)
    """Maximum number of stop strings, and of stop token ids, in a request."""
    max_stop_chars: int = Field(1024, ge=1, le=2**20)
    """Maximum length of a stop string in a request, in characters."""
    max_logit_bias: int = Field(1024, ge=0, le=2**20)
    """Maximum number of logit_bias entries in a request."""
    max_messages: int = Field(4096, ge=1, le=2**20)
    """Maximum number of messages in a request."""
    max_message_parts: int = Field(2**14, ge=1, le=2**20)
    """Maximum number of parts and tool calls in all messages of a request together."""
    max_tools: int = Field(128, ge=0, le=4096)
    """Maximum number of tools in a request."""
    max_grammar_bytes: int = Field(64 * 2**10, ge=1, le=2**24)
    """Maximum size of a JSON Schema, regular expression, grammar or list of choices in a request."""
    max_grammar_seconds: values.Seconds = 2.0
    """Processor time that it may take to compile one of these. It is compiled in a process of its own first."""
    max_grammar_memory_bytes: int = Field(256 * 2**20, ge=2**20, le=2**40)
    """Memory that it may take to compile one of these."""
    max_json_depth: int = Field(64, ge=8, le=200)
    """Maximum nesting depth of a request body."""
    max_speculative_tokens: int = Field(32, ge=0, le=MOST_DEPTH)
    """Maximum k that a request may ask for, and maximum number of nodes in its tree."""
    tool_call_parser: values.ToolCallParser | None = None
    """Tool-call format of the model, by vLLM's name. null detects it from the chat template."""
    reasoning_parser: values.ReasoningParser | None = None
    """Reasoning format of the model, by vLLM's name, to separate thinking from content. null leaves it in content."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "summary"
    """Acceptance in each response: none, summary, or detailed, which adds the counts of each step."""
    metrics_prefix: str = Field("specdec", pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")
    """Prefix of the metrics' names. Use vllm for dashboards made for vLLM."""
    log_format: Literal["text", "json"] = "text"
    """Format of the log on stderr."""
    log_prompts: bool = False
    """Log prompts."""
    log_polls: bool = False
    """Log requests to /health and /metrics."""


class Train(Section):
    """Training of a draft: its method, data, loss, schedule and evaluation."""

    method: str = Field("eagle3", min_length=1)
    """Kind of draft to train: the name of a training method, such as eagle3."""
    data: str | None = Field(None, min_length=1)
    """Prompts or chats to train on: a file, a preset, a hub id, builtin:mini or builtin:stories."""
    num_prompts: int | None = Field(None, ge=2, le=2**31 - 1)
    """Maximum number of prompts to use, spread evenly over the tasks. null uses all."""
    num_held_out: int = Field(16, ge=1, le=2**20)
    """Prompts to leave out of training and to measure acceptance on."""
    answers_per_prompt: int = Field(1, ge=1, le=1024)
    """Answers that the target writes to each prompt; more than one needs a temperature above 0."""
    epochs: int = Field(3, ge=1, le=10**6)
    """Passes over the samples."""
    max_steps: int | None = Field(None, ge=1, le=2**31 - 1)
    """Stop after this many steps, before or after `epochs`."""
    batch_size: int = Field(8, ge=1, le=_MOST_SEQUENCES)
    """Samples in a step, over all devices."""
    learning_rate: float | None = Field(None, gt=0, le=10)
    """Peak learning rate, after a linear warm-up and before a cosine to zero. null goes by the target's width."""
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    """Fraction of the steps in which the learning rate rises."""
    weight_decay: float = Field(0.0, ge=0, le=10)
    """Weight decay of AdamW."""
    max_grad_norm: float = Field(0.5, gt=0, le=10**6)
    """Clip gradients to this norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the draft's matrix products. auto takes bfloat16 where the hardware multiplies it, else float32."""
    loss: Literal["kl", "ce", "tv", "nla", "ce-tv", "hybrid"] | None = None
    """Divergence from the target's distribution: kl, ce, tv, nla, ce-tv or hybrid. null takes kl, for dspark ce-tv."""
    position_weights: Literal["decay", "d-pace"] = "decay"
    """Weights of a block's rows (block drafts): decay goes by their place, d-pace by what is accepted from there on."""
    depth: int | None = Field(None, ge=1, le=MOST_DEPTH)
    """Tokens to learn to draft: unrolled steps (eagle3), tokens of a pass (block drafts, pard) or heads (medusa)."""
    depth_decay: float = Field(0.8, gt=0, le=1)
    """Weight of each depth in the loss, relative to the one before."""
    layers: values.LayerNumbers = None
    """Target layers whose outputs the draft reads, counted from 0, such as 1-6-10. null takes the method's."""
    draft_vocab_size: int | None = Field(None, ge=2, le=2**31 - 1)
    """Most frequent tokens that the draft can draft. null: 32000, or all of up to 16384; distill: all."""
    intermediate_size: int | None = Field(None, ge=1, le=2**20)
    """Width of the draft's feed-forward layers. null takes the target's."""
    hidden_size: int | None = Field(None, ge=1, le=2**20)
    """Channels of the target's hidden states to keep (distill). null keeps all."""
    num_attention_heads: int | None = Field(None, ge=1, le=2**16)
    """Attention heads of the target to keep in each layer (distill). null keeps all."""
    num_key_value_heads: int | None = Field(None, ge=1, le=2**16)
    """Key/value heads to keep (distill). null keeps the target's ratio of them to attention heads."""
    num_layers: int | None = Field(None, ge=1, le=1024)
    """Decoder layers of the draft (block drafts, distill). null takes a quarter of the target's, for blocks 1 to 5."""
    num_anchors: int = Field(512, ge=1, le=2**20)
    """Blocks to draw from each answer at most (dflash, dflash2, dspark)."""
    sample_from_anchor: bool = False
    """A block's rows predict the token behind their own (dflash), so that B rows give B tokens and not B - 1."""
    mask_token: int | None = Field(None, ge=0, le=2**31 - 1)
    """Token that stands for those not drafted yet (block drafts, pard). null takes the rarest token of the data."""
    start_from: str | None = Field(None, min_length=1)
    """Model with the target's tokenizer to begin with (pard, distill). null prunes the target itself (distill)."""
    keep_answers: bool = False
    """Train on the data's answers, not the target's own: a chat's assistant's, or the column answer, output, ..."""
    answers_from: str | None = Field(None, min_length=1)
    """Output folder of an earlier run: its answers to the same prompts are used again."""
    cache_features: bool = False
    """Keep the target's hidden states of all samples on disk (bfloat16), so that it reads each sample once."""
    evaluate_every: int | None = Field(None, ge=1, le=2**31 - 1)
    """Measure acceptance on the held-out prompts after so many steps. null measures ten times."""
    save_every: int | None = Field(None, ge=1, le=2**31 - 1)
    """Save a checkpoint after so many steps. null saves with each measurement."""
    patience: int = Field(0, ge=0, le=10**6)
    """Stop once this many measurements in a row have not raised the acceptance length. 0 never stops early."""
    seed: int = Field(0, ge=0, le=2**63 - 1)
    """Seed of the first weights and of the order of the samples."""


class Recipe(Section):
    """Everything that decides what a run decodes and how."""

    target: Target = Field(default_factory=Target)
    draft: Draft = Field(default_factory=lambda: Draft(model=DEFAULT_DRAFT))
    speculation: Speculation = Field(default_factory=Speculation)
    sampling: Sampling = Field(default_factory=Sampling)
    structured: Structured = Field(default_factory=Structured)
    engine: EngineSection = Field(default_factory=EngineSection)
    workload: WorkloadSection = Field(default_factory=WorkloadSection)
    serve: Serve = Field(default_factory=Serve)
    gates: Gates = Field(default_factory=Gates)
    train: Train = Field(default_factory=Train)

    def draft_fields(self) -> dict[str, Any]:
        """The draft as drafters take it: `model`, or `method`, and the method's options."""
        named = {"model": self.draft.model, "method": self.draft.method, "first": self.draft.first}
        return {key: value for key, value in named.items() if value is not None} | self.draft.options

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: every key with its value; what has no meaning for this draft and policy is left out."""
        document: dict[str, Any] = self.model_dump(mode="json")
        unused = [key for key in ("method", "first") if getattr(self.draft, key) is None]
        unused += [] if self.draft.model is not None else ["model", *MODEL_KEYS]
        document["draft"] = {key: value for key, value in document["draft"].items() if key not in unused}
        for key in ("k_by_batch", "k_by_context"):
            schedule = getattr(self.speculation, key)
            if schedule is not None:
                document["speculation"][key] = values.schedule_text(schedule)
        if self.speculation.depth_policy != "confidence":
            del document["speculation"]["p_min"]
        if self.train == Train():
            del document["train"]
        elif self.train.layers is not None:
            document["train"]["layers"] = "-".join(map(str, self.train.layers))
        document["structured"] = self.structured.given
        if not document["structured"]:
            del document["structured"]
        return document
