"""Forms that parts of a module take where a plan says how it is split.

The module's own code stays. Inside of it activations are *common*, equal on all ranks of the
tensor-parallel group, but for those between a column and a row; see docs/design/plans.md.
"""
