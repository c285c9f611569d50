"""Is the loss of a batch the weighted mean of the losses of its pieces?"""
