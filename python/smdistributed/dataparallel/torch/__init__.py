"""The import path of the public data-parallel interface."""

from smp.v1.data_parallel import get_local_rank as get_local_rank
from smp.v1.data_parallel import get_rank as get_rank
from smp.v1.data_parallel import get_world_size as get_world_size
