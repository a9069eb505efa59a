# Written by specdec X.Y.Z for transformers 5.23.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: k by batch size is left out: transformers has one k.
# Warning: the draft is left out: transformers has no counterpart of an EAGLE-3 head, and decodes without a draft.
# Warning: the settings of serve are left out: this is a script and no server.
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained('Qwen/Qwen3-8B')
target = AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-8B', dtype="auto")
torch.manual_seed(0)
prompt = tokenizer(sys.argv[1], return_tensors="pt").to(target.device)
output = target.generate(
    **prompt,
    max_new_tokens=128,
    do_sample=False,
)
print(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
