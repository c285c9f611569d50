"""Everything that makes a model fit, with everything else: see `test_grid.py`."""
