"""How many prompts a run may leave out of training."""

from __future__ import annotations

from specdec_cli.errors import UsageError


def check_held_out(num_held_out: int, num_prompts: int) -> None:
    """Refuse to hold out every prompt.

    Raises:
        UsageError: none is left to train on.
    """
    if num_prompts <= num_held_out:
        prompts = "prompt" if num_prompts == 1 else "prompts"
        message = f"`{num_held_out}` of `{num_prompts}` {prompts} are to be held out, which leaves none to train on"
        raise UsageError(message, "give more prompts, or lower --num-held-out")
