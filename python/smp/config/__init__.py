"""The configuration: keys, their rules, and their sources."""
