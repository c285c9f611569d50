"""``smp.DistributedModel``, and the owners behind it."""

from smp.model.distributed_model import DistributedModel as DistributedModel
from smp.model.distributed_model import engine_of as engine_of
from smp.model.distributed_model import is_tracing as is_tracing
from smp.model.distributed_model import whole_parameters as whole_parameters
