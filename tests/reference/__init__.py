"""Reference of one process: tiny models, their data, the plain training loop, tolerances."""
