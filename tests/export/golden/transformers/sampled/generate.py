# Written by specdec X.Y.Z for transformers 5.23.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the settings of serve are left out: this is a script and no server.
# Warning: target.tensor_parallel_size = 2 is left out: transformers has no such setting, or specdec does not know it.
# Warning: engine.max_num_seqs = 16 is left out: transformers has no such setting, or specdec does not know it.
# Warning: engine.max_model_len = 8192 is left out: transformers has no such setting, or specdec does not know it.
# Warning: engine.kv_cache_memory = 90% is left out: transformers has no such setting, or specdec does not know it.
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained('Qwen/Qwen3-8B')
target = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B', dtype=torch.bfloat16, revision='main')
assistant = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B', dtype="auto")
assistant.generation_config.num_assistant_tokens = 4
assistant.generation_config.num_assistant_tokens_schedule = "constant"
assistant.generation_config.assistant_confidence_threshold = 0.0
torch.manual_seed(0)
prompt = tokenizer(sys.argv[1], return_tensors="pt").to(target.device)
output = target.generate(
    **prompt,
    assistant_model=assistant,
    max_new_tokens=128,
    do_sample=True,
    temperature=0.6,
    top_k=0,
    top_p=0.95,
    min_p=0.0,
    stop_strings=['END', "it's"],
    tokenizer=tokenizer,
)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
