# Written by specdec X.Y.Z for OpenVINO GenAI 2026.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: draft.min = 2 is left out: OpenVINO GenAI tries n-grams down to one token.
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys
from pathlib import Path

import openvino_genai

here = Path(__file__).parent
scheduler = openvino_genai.SchedulerConfig()
scheduler.enable_prefix_caching = True
pipeline = openvino_genai.LLMPipeline(
    str(here / "target"),
    "CPU",
    scheduler_config=scheduler,
    prompt_lookup=True,
)
config = openvino_genai.GenerationConfig()
config.num_assistant_tokens = 6
config.max_ngram_size = 5
config.max_new_tokens = 256
config.do_sample = False
print(pipeline.generate(sys.argv[1], config))
