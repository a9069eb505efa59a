"""Keys and values: blocks, contexts, how much memory they may take, and how they are read."""
