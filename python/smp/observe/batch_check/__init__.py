"""Checks whether the loss of a batch is the weighted mean of the losses of its pieces."""
