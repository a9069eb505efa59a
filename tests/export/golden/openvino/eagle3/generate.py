# Written by specdec X.Y.Z for OpenVINO GenAI 2026.4.
# Nothing was measured: give the result of a measurement with --measured FILE.
# Warning: the draft `AngelSlim/Qwen3-8B_eagle3` is taken for an EAGLE-3 head because of its name.
# Warning: k by batch size is left out: OpenVINO GenAI has one k.
# Warning: speculation.tree = 2,1 is left out: a chain is drafted, because OpenVINO GenAI describes trees in another way, by branching_factor and tree_depth.
# Warning: the settings of serve are left out: this is a script and no server.
"""Generate with the target and the draft of a recipe: python generate.py "a prompt" """

import sys
from pathlib import Path

import openvino_genai

here = Path(__file__).parent
scheduler = openvino_genai.SchedulerConfig()
pipeline = openvino_genai.LLMPipeline(
    str(here / "target"),
    "CPU",
    scheduler_config=scheduler,
    draft_model=openvino_genai.draft_model(str(here / "draft"), "CPU"),
)
config = openvino_genai.GenerationConfig()
config.num_assistant_tokens = 5
config.max_new_tokens = 128
config.do_sample = False
print(pipeline.generate(sys.argv[1], config))
