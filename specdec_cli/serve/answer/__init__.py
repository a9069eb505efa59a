"""Engine events turned into answers: chat, completions and responses, whole and streamed."""
