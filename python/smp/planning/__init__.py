"""Predicts from shapes alone what a run will hold and how long a step takes. Pure functions."""
