"""The predicted speed-up of every k: traces, replay and the costs of steps."""
