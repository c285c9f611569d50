"""Out of memory: what was held, what was expected, and what would have made it fit."""
