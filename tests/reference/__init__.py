"""One-process truth: tiny models, their data, the plain training loop, tolerances."""
