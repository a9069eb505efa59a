# Written by specdec X.Y.Z for OpenVINO GenAI 2026.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: target.revision = main is left out: optimum-cli converts the newest; give it a folder of that revision.
# Warning: OpenVINO GenAI's sampling with a draft does not keep the target's distribution.
# Warning: the settings of serve are left out: this is a script and no server.
# Warning: target.tensor_parallel_size = 2 is left out: OpenVINO GenAI has no such setting, or specdec does not know it.
# Warning: engine.max_model_len = 8192 is left out: OpenVINO GenAI has no such setting, or specdec does not know it.
# Warning: engine.kv_cache_memory = 90% is left out: OpenVINO GenAI has no such setting, or specdec does not know it.
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys
from pathlib import Path

import openvino_genai

here = Path(__file__).parent
scheduler = openvino_genai.SchedulerConfig()
scheduler.max_num_seqs = 16
pipeline = openvino_genai.LLMPipeline(
    str(here / "target"),
    "CPU",
    scheduler_config=scheduler,
    draft_model=openvino_genai.draft_model(str(here / "draft"), "CPU"),
)
config = openvino_genai.GenerationConfig()
config.num_assistant_tokens = 4
config.max_new_tokens = 128
config.do_sample = True
config.rng_seed = 0
config.temperature = 0.6
config.top_p = 0.95
config.stop_strings = {'END', "it's"}
print(pipeline.generate(sys.argv[1], config))
