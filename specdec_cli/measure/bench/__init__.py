"""What was measured and what follows: bench, sweep-k, compare-drafts, their journal and verdicts."""
