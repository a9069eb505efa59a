"""Training of drafts for a target: samples of its own text, its features, a method's loss, and the loop around them."""
