"""Averages gradients over data-parallel ranks, and gives these the same initial values."""

from smp.data_parallel.batch_shares import batch_slice as batch_slice
from smp.data_parallel.batch_weights import BatchWeights as BatchWeights
from smp.data_parallel.batch_weights import num_batches as num_batches
from smp.data_parallel.bucket_size import DEFAULT_MB as DEFAULT_MB
from smp.data_parallel.bucket_size import bucket_cap_bytes as bucket_cap_bytes
from smp.data_parallel.comm_hook import CommHook as CommHook
from smp.data_parallel.comm_hook import refuse_comm_hook as refuse_comm_hook
from smp.data_parallel.reduction import Reduction as Reduction
from smp.data_parallel.reduction import broadcast_from_first as broadcast_from_first
from smp.data_parallel.reduction import gather_numbers as gather_numbers
from smp.data_parallel.reduction import make_records as make_records
from smp.data_parallel.reduction import make_reducers as make_reducers
from smp.data_parallel.reduction import reduction_of as reduction_of
from smp.data_parallel.uneven import UnevenBatches as UnevenBatches
