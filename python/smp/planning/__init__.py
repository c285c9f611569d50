"""What a run will hold and how long a step will take, from shapes alone. Pure functions."""
