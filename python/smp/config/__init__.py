"""The configuration: keys, their rules, and the sources they come from."""
