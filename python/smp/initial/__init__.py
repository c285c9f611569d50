"""Initial values: parameters that are made late, elsewhere, or in parts only."""
