"""What is run: data sets and row files, and the prompts and turns that come out of them."""
