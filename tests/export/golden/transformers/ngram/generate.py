# Written by specdec X.Y.Z for transformers 5.23.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: draft.min = 2 is left out: transformers tries n-grams down to one token.
# Warning: engine.enable_prefix_caching = true is left out: transformers has no such setting, or specdec does not know it.
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained('meta-llama/Llama-3.1-8B-Instruct')
target = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.1-8B-Instruct', dtype="auto")
torch.manual_seed(0)
prompt = tokenizer(sys.argv[1], return_tensors="pt").to(target.device)
output = target.generate(
    **prompt,
    prompt_lookup_num_tokens=6,
    max_matching_ngram_size=5,
    max_new_tokens=256,
    do_sample=False,
)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
