"""What every k would bring: traces, replay, the costs of steps, and the prediction from both."""
