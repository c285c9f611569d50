"""A re-export of `smp.v1.data_parallel` and nothing else."""

from smp.v1.data_parallel import ReduceOp as ReduceOp
from smp.v1.data_parallel import all_gather as all_gather
from smp.v1.data_parallel import all_reduce as all_reduce
from smp.v1.data_parallel import all_to_all_single as all_to_all_single
from smp.v1.data_parallel import barrier as barrier
from smp.v1.data_parallel import broadcast as broadcast
from smp.v1.data_parallel import get_local_rank as get_local_rank
from smp.v1.data_parallel import get_rank as get_rank
from smp.v1.data_parallel import get_world_size as get_world_size
from smp.v1.data_parallel import group as group
from smp.v1.data_parallel import init_process_group as init_process_group
from smp.v1.data_parallel import is_available as is_available
from smp.v1.data_parallel import is_initialized as is_initialized
