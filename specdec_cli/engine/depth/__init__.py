"""How deep to guess: the fixed k, the adaptive policy, and the acceptance and costs that it estimates."""
