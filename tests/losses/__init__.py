"""Losses of people, against the same script in one process on the whole batch."""
