"""Per-sample log-probs and entropy of response tokens under context and tensor parallelism: a teaching reference."""
