"""How many tokens to draft: fixed k, a heuristic, the adaptive policy and its estimates of acceptance and cost."""
