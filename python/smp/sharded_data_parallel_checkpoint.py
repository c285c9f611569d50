"""Import path of v1 for merging checkpoints of sharded data parallelism."""

from smp.v1.sharded_checkpoint import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint,
)

__all__ = [
    "get_full_state_dict_from_sharded_data_parallel_checkpoint",
]
