"""``smp.DistributedOptimizer`` and the optimizers that update in one pass."""
