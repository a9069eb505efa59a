"""Being here puts this folder on the path, so that tests in subfolders import its models and toys.

One thread, in child processes too: on models this small a second one only waits, and a busy machine makes it wait long.
Without a GPU Triton's kernels run in its interpreter, which has to be said before it is imported.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
