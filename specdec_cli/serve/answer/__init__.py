"""Events of the engine as answers: chat, completions and responses, whole and streamed."""
