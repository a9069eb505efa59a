"""How many tokens to draft: fixed k, the adaptive policy, and its estimates of acceptance and cost."""
