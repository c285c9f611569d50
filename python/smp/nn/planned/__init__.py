"""Forms of a module's parts that a plan splits.

The module's own code stays. Activations inside of it are *common*, that is, equal on all ranks of
the tensor-parallel group, except those between a column and a row; see docs/design/plans.md.
"""
