"""Being here puts this folder on the path, so that tests in subfolders import its models and toys.

One thread, in child processes too: on models this small a second one only waits, and a busy machine makes it wait long.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
