"""
C++ core of smp; the public names are in the package `smp`.
"""
from __future__ import annotations
import collections.abc
import torch
import torch._C._distributed_c10d
import typing
__all__: list[str] = ['ActivationStore', 'Assignment', 'BoundaryCost', 'Communicator', 'Coordinates', 'DEFAULT_POLICY', 'DeviceMeter', 'Evaluation', 'FaultBoard', 'FileReader', 'FileWriter', 'FlatGathers', 'FlightWatch', 'Handshake', 'HookedGroup', 'HostLayout', 'LinkProbe', 'LivenessClient', 'LivenessHub', 'MIN_SECRET_BYTES', 'Mailbox', 'MicrobatchListener', 'ModuleTree', 'NodeKind', 'ObjectExchange', 'ParameterRecord', 'ParameterScope', 'ParameterStore', 'ParameterStoreStats', 'Part', 'PartitionOptions', 'PeerFailure', 'PeerSockets', 'Placement', 'PlacementRule', 'Policy', 'ProcessGrid', 'PromisedWork', 'RandomState', 'RankUsage', 'ReduceOp', 'Reducer', 'ReducerStats', 'ReductionGroup', 'RefState', 'Server', 'ShardHolding', 'ShardInterval', 'ShardLayout', 'ShardSegment', 'ShardedBucket', 'Sharding', 'SharedMemory', 'SimulationResult', 'SliceRead', 'StageCost', 'StopAgreement', 'TaskScope', 'TensorParallelGroup', 'Timeline', 'TimelineEntry', 'TokenRoutes', 'ViewOfArgument', 'Work', 'agree_on_maxima', 'broadcast_coalesced', 'check_wishes', 'complete_partition', 'connect_shared_memory', 'copy_tensor', 'crc32', 'current_microbatch', 'current_step', 'evaluate_partition', 'exchange_layer_name', 'executed_actions', 'explain_placement', 'gather_numbers', 'host_memory_stats', 'in_context', 'is_recomputing', 'lay_out_by_hosts', 'link_view', 'make_assignment', 'make_c10d_communicator', 'make_grad_bucket', 'make_hierarchical_communicator', 'make_mpi_group', 'make_mpi_world', 'make_policy', 'make_socket_communicator', 'mix_seed', 'move_in_partition', 'mpi_available', 'mpi_finalize', 'normalize_schedule', 'own_address', 'plan_part_reads', 'plan_schedule', 'plan_shards', 'policy_names', 'rank_prefix', 'recompute', 'ref_state', 'release_host_memory', 'release_idle_host_memory', 'seed_generators', 'set_details_file', 'set_rank_prefix', 'set_tensor_parallel_alone', 'share_collectives', 'share_ref', 'simulate_lists', 'simulate_policy', 'solve_partition', 'unit_places', 'use_host_allocator', 'vocabulary_embedding', 'watch_collectives']
class PeerFailure(RuntimeError):
    """
    Another rank raised, exited or died. The text names the rank, the place and the reason.
    """
class MicrobatchListener:
    """
    Hears of the end of microbatches.
    """
class HostLayout:
    """
    How ranks of a group lie on hosts; see topology/host_layout.h.
    """
    @property
    def across(self) -> list[int]:
        """
        Group ranks with the same place, by host.
        """
    @property
    def is_host_by_host(self) -> bool:
        ...
    @property
    def obstacle(self) -> str:
        """
        Why collectives cannot go by hosts; empty: they can.
        """
    @property
    def within(self) -> list[int]:
        """
        Group ranks of the own host.
        """
class Coordinates:
    """
    Place of a rank on the grid.
    """
    def __init__(self, pp: int, tp: int, rdp: int) -> None:
        ...
    @property
    def pp(self) -> int:
        ...
    @property
    def rdp(self) -> int:
        ...
    @property
    def tp(self) -> int:
        ...
class ProcessGrid:
    """
    Which global rank has which place; a group kind is one of world, mp, dp, pp, tp, rdp.
    """
    def __init__(self, world_size: int, pp_size: int, tp_size: int, placement_strategy: str) -> None:
        ...
    def coordinates(self, global_rank: int) -> Coordinates:
        ...
    def describe(self, global_rank: int) -> str:
        ...
    def global_rank(self, coordinates: Coordinates) -> int:
        ...
    def group(self, kind: str, global_rank: int) -> list[int]:
        """
        Global ranks of the group, ascending.
        """
    def group_rank(self, kind: str, global_rank: int) -> int:
        """
        Position of `global_rank` in its group.
        """
    def group_size(self, kind: str) -> int:
        ...
    def groups(self, kind: str) -> list[list[int]]:
        """
        All groups of a kind.
        """
    @property
    def placement(self) -> str:
        ...
    @property
    def world_size(self) -> int:
        ...
class ShardInterval:
    """
    Indices [begin, end) of one tensor dim (or of the flat tensor: dim -1) of size extent.
    """
    @staticmethod
    def even(extent: int, num_shards: int, shard_idx: int, dim: int = 0) -> ShardInterval:
        ...
    @staticmethod
    def flat(numel: int, num_shards: int, shard_idx: int) -> ShardInterval:
        ...
    @staticmethod
    def whole(extent: int, dim: int = 0) -> ShardInterval:
        ...
    def __eq__(self, other: object) -> bool:
        ...
    def __getstate__(self) -> tuple[typing.Any, ...]:
        ...
    def __hash__(self) -> int:
        ...
    def __init__(self, dim: int, begin: int, end: int, extent: int) -> None:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, arg0: tuple[typing.Any, ...]) -> None:
        ...
    def intersect(self, other: ShardInterval) -> ShardInterval:
        ...
    def shape(self, shape: collections.abc.Sequence[int]) -> list[int]:
        """
        Sizes of the slice of a tensor of sizes `shape`.
        """
    @property
    def begin(self) -> int:
        ...
    @property
    def dim(self) -> int:
        ...
    @property
    def end(self) -> int:
        ...
    @property
    def extent(self) -> int:
        ...
    @property
    def is_whole(self) -> bool:
        ...
    @property
    def size(self) -> int:
        ...
class NodeKind:
    """
    How a module may be cut.
    
    Members:
    
      PLAIN
    
      LIST : Cut between children, not through them.
    
      INDIVISIBLE : Kept whole.
    """
    INDIVISIBLE: typing.ClassVar[NodeKind]
    LIST: typing.ClassVar[NodeKind]
    PLAIN: typing.ClassVar[NodeKind]
    __members__: typing.ClassVar[dict[str, NodeKind]]
    def __eq__(self, other: object) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class ModuleTree:
    """
    One node per module, parents before children.
    """
    def __init__(self) -> None:
        ...
    def __len__(self) -> int:
        ...
    def activation_bytes(self, idx: int) -> int:
        """
        Own, per microbatch, without children.
        """
    def add_alias(self, parent_idx: int, idx: int) -> None:
        """
        The node is registered below this one as well.
        """
    def add_node(self, name: str, parent_idx: int, param_bytes: int, has_state: bool, compute: float = 0.0, kind: NodeKind = NodeKind.PLAIN, activation_bytes: int = 0) -> int:
        """
        Appends a node and returns its index; the root has parent -1.
        """
    def add_value(self, producer_idx: int, num_bytes: int, consumer_idxs: collections.abc.Sequence[int], needs_grad: bool, source_values: collections.abc.Sequence[int] = [], compute: float = 0.0, activation_bytes: int = 0) -> int:
        """
        A tensor that own code of one node makes and that of others reads; returns its id. With sources a split module leaves it, and its costs, to where the last of them is.
        """
    def compute(self, idx: int) -> float:
        """
        Own forward and backward, without children.
        """
    def execution_order(self) -> list[int]:
        """
        All nodes in the order of execution, parents before children.
        """
    def name(self, idx: int) -> str:
        ...
    def param_bytes(self, idx: int) -> int:
        """
        Own parameters, without those of children.
        """
    def parent_idx(self, idx: int) -> int:
        """
        -1 for the root.
        """
    def set_costs(self, idx: int, compute: float, activation_bytes: int, forward: float = 0.0) -> None:
        """
        Own costs of one microbatch, as a trace measured them; of compute the part in forwards.
        """
    def set_order(self, node_idxs: collections.abc.Sequence[int]) -> None:
        """
        Nodes in the order of their first call.
        """
    def set_wish(self, idx: int, partition_idx: int) -> None:
        """
        Asks for a node to be on a partition; nodes below by themselves.
        """
    def tie(self, idx_a: int, idx_b: int) -> None:
        """
        The two nodes share a parameter and stay together.
        """
    @property
    def compute_per_byte(self) -> float:
        """
        Cost of a byte over a boundary in the unit of compute.
        """
    @compute_per_byte.setter
    def compute_per_byte(self, arg1: float) -> None:
        ...
    @property
    def num_values(self) -> int:
        ...
    @property
    def total_param_bytes(self) -> int:
        ...
class PartitionOptions:
    def __init__(self, num_partitions: int, memory_weight: float = 0.8, num_chunks: int = 1, kept_microbatches: collections.abc.Sequence[int] = [], state_factor: float = 4.0, memory_limit_bytes: int = 0, must_fit: bool = True, lead_weight: float = 0.0) -> None:
        ...
    @property
    def kept_microbatches(self) -> list[int]:
        ...
    @property
    def lead_weight(self) -> float:
        ...
    @property
    def memory_limit_bytes(self) -> int:
        ...
    @property
    def memory_weight(self) -> float:
        ...
    @property
    def must_fit(self) -> bool:
        ...
    @property
    def num_chunks(self) -> int:
        ...
    @property
    def num_partitions(self) -> int:
        ...
    @property
    def state_factor(self) -> float:
        ...
class PlacementRule:
    """
    Why a module is where it is.
    
    Members:
    
      DRIVER
    
      ASKED
    
      UNIT
    
      TOGETHER
    
      SPLIT
    
      TIED
    
      FOLLOWS
    """
    ASKED: typing.ClassVar[PlacementRule]
    DRIVER: typing.ClassVar[PlacementRule]
    FOLLOWS: typing.ClassVar[PlacementRule]
    SPLIT: typing.ClassVar[PlacementRule]
    TIED: typing.ClassVar[PlacementRule]
    TOGETHER: typing.ClassVar[PlacementRule]
    UNIT: typing.ClassVar[PlacementRule]
    __members__: typing.ClassVar[dict[str, PlacementRule]]
    def __eq__(self, other: object) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class Placement:
    @property
    def other_idx(self) -> int:
        ...
    @property
    def rule(self) -> PlacementRule:
        ...
class Assignment:
    """
    Which partition owns each node.
    """
    def to_text(self, tree: ModuleTree) -> str:
        """
        The lines of the log.
        """
    @property
    def chunk_idxs(self) -> list[int]:
        ...
    @property
    def hash(self) -> int:
        ...
    @property
    def load_bytes(self) -> list[int]:
        ...
    @property
    def num_chunks(self) -> int:
        ...
    @property
    def num_partitions(self) -> int:
        ...
    @property
    def partition_idxs(self) -> list[int]:
        ...
class Evaluation:
    """
    What an assignment costs.
    """
    @property
    def activation_bytes(self) -> list[float]:
        """
        Per stage, one microbatch, with copies.
        """
    @property
    def boundary_bytes(self) -> list[int]:
        """
        From partition i to j at i * num_partitions + j.
        """
    @property
    def compute(self) -> list[float]:
        """
        Per stage.
        """
    @property
    def crossing_bytes(self) -> int:
        ...
    @property
    def forward(self) -> list[float]:
        """
        Per stage, the part of compute in forwards.
        """
    @property
    def largest_load(self) -> float:
        ...
    @property
    def loads(self) -> list[float]:
        """
        Per stage.
        """
    @property
    def memory_bytes(self) -> list[float]:
        """
        Per partition, at the peak.
        """
    @property
    def param_bytes(self) -> list[float]:
        """
        Per stage.
        """
    @property
    def transfer_bytes(self) -> list[int]:
        """
        Per stage, sent and received.
        """
class Policy:
    """
    What depends on the kind of schedule.
    """
    def default_active_microbatches(self, num_partitions: int, num_microbatches: int) -> int:
        ...
    def kept_microbatches(self, num_partitions: int, num_chunks: int, num_microbatches: int, active_microbatches: int) -> list[int]:
        """
        Per rank, of how many microbatches it keeps activations.
        """
    @property
    def default_chunks(self) -> int:
        ...
    @property
    def forwards_come_first(self) -> bool:
        """
        No backward begins while the driver has forwards to do.
        """
    @property
    def name(self) -> str:
        ...
class StageCost:
    """
    One link of the chain.
    """
    def __init__(self, rank: int, forward_ms: float, backward_ms: float, weight_ms: float, activation_bytes: int) -> None:
        ...
class BoundaryCost:
    """
    Between a stage and the next.
    """
    def __init__(self, latency_ms: float, ms_per_byte: float, forward_bytes: int, backward_bytes: int) -> None:
        ...
class RankUsage:
    """
    What a simulated step asks of a rank.
    """
    @property
    def bubble_ms(self) -> float:
        ...
    @property
    def busy_ms(self) -> float:
        ...
    @property
    def peak_activation_bytes(self) -> int:
        ...
    @property
    def peak_activations(self) -> int:
        ...
class TimelineEntry:
    """
    One action of one rank.
    """
    @property
    def action(self) -> str:
        ...
    @property
    def end_ms(self) -> float:
        ...
    @property
    def rank(self) -> int:
        ...
    @property
    def stage(self) -> int:
        ...
    @property
    def start_ms(self) -> float:
        ...
class SimulationResult:
    """
    A simulated step.
    """
    @property
    def executed(self) -> str:
        ...
    @property
    def makespan_ms(self) -> float:
        ...
    @property
    def ranks(self) -> list[RankUsage]:
        ...
    @property
    def timeline(self) -> list[TimelineEntry]:
        ...
class FaultBoard:
    """
    What this process knows about failures of all ranks.
    """
    def __init__(self, global_rank: int) -> None:
        ...
    def activity(self) -> dict[str, typing.Any]:
        """
        What this process waits for: blocked, what, progress, unsent.
        """
    def fault_kind(self) -> str | None:
        """
        How it failed: raised, died, unreachable, left, deadlock or stuck; or None.
        """
    def fault_rank(self) -> int | None:
        """
        Its global rank, or None.
        """
    def fault_text(self) -> str | None:
        """
        The first fault in words, or None.
        """
    def has_left(self, global_rank: int) -> bool:
        ...
    def raise_if_faulted(self) -> None:
        ...
    def report_raised(self, where: str, text: str) -> None:
        """
        Records an exception of this rank; the liveness client tells it to the others.
        """
    def set_activity(self, text: str) -> None:
        """
        What this process works on, for reports.
        """
    def set_addresses(self, per_global_rank: collections.abc.Sequence[str]) -> None:
        """
        Where the host of each rank is reached; empty: not known.
        """
    def set_coordinates(self, per_global_rank: collections.abc.Sequence[str]) -> None:
        """
        Words for each rank, such as "pp 1 tp 0 rdp 1".
        """
    @property
    def global_rank(self) -> int:
        ...
class StopAgreement:
    """
    Finds a boundary at which all ranks can stop.
    """
    def __init__(self, board: FaultBoard) -> None:
        ...
    def arrive(self, timeout_s: float) -> bool:
        """
        Passes a boundary; whether all ranks stop here.
        """
    def decide(self, boundary: int) -> None:
        ...
    def freeze(self) -> int:
        """
        From now on `arrive` waits; the number of the next boundary.
        """
    @property
    def is_asked(self) -> bool:
        ...
class Handshake:
    """
    One side of the proof that both ends of a connection know the secret.
    """
    @staticmethod
    def caller(secret: bytes, purpose: str, number: int) -> Handshake:
        ...
    @staticmethod
    def listener(secret: bytes, purpose: str) -> Handshake:
        ...
    def advance(self, received: bytes) -> tuple[int, bytes]:
        """
        Takes bytes; how many belong to it, and the bytes to send. RuntimeError when the other side does not know the secret.
        """
    @property
    def caller_number(self) -> int:
        ...
    @property
    def is_proven(self) -> bool:
        ...
class LivenessHub:
    """
    Hosted by rank 0: tells all ranks which of them have died.
    """
    def __init__(self, world_size: int, *, address: str, secret: bytes, deadlock_after_s: float = 5.0, hang_after_s: float = 0.0, hang_raises: bool = False) -> None:
        ...
    def close(self, linger_s: float = 0.0) -> None:
        """
        Waits up to linger_s for all ranks to leave, then ends.
        """
    @property
    def port(self) -> int:
        ...
class LivenessClient:
    """
    Connection of one rank to the hub.
    """
    def __init__(self, host: str, port: int, *, secret: bytes, global_rank: int, board: FaultBoard, connect_timeout_s: float = 60.0, stops: StopAgreement | None = None, stacks_signals: typing.Annotated[collections.abc.Sequence[int], "FixedSize(3)"] | None = None, stacks_fd: int = -1, hang_after_s: float = 0.0, hang_raises: bool = False, interrupt_signal: int = -1, device: str = 'cpu') -> None:
        ...
    def close(self) -> None:
        ...
    def leave(self) -> None:
        """
        Says goodbye; the end of this process is no fault any more.
        """
    def report_raised(self, where: str, text: str) -> None:
        """
        Tells all ranks of an exception of this rank.
        """
    def request_stop(self) -> None:
        """
        Asks all ranks to stop at one boundary.
        """
class ReduceOp:
    """
    How a collective combines values.
    
    Members:
    
      SUM
    
      MAX
    
      MIN
    """
    MAX: typing.ClassVar[ReduceOp]
    MIN: typing.ClassVar[ReduceOp]
    SUM: typing.ClassVar[ReduceOp]
    __members__: typing.ClassVar[dict[str, ReduceOp]]
    def __eq__(self, other: object) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class Work:
    """
    One operation in flight; keeps its tensors alive.
    """
    def abort(self) -> None:
        ...
    def done(self) -> bool:
        ...
    def wait(self, timeout_s: float) -> None:
        """
        Blocks until finished; RuntimeError when it failed, was aborted or timed out, or when a rank has failed that the library knows of.
        """
    @property
    def source_rank(self) -> int:
        """
        Group rank of the sender, after a recv_any.
        """
class Communicator:
    """
    A group of ranks that exchange contiguous tensors; ranks are group ranks. Every operation returns a Work at once.
    """
    def abort(self) -> None:
        """
        Ends all waits in this process with an error; further calls raise.
        """
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """
        output [size * n], input [n].
        """
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        ...
    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Work:
        """
        Both [size * n]: part i of the input goes to group rank i.
        """
    def barrier(self) -> Work:
        ...
    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        ...
    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Work:
        ...
    def recv_any(self, tensor: torch.Tensor, tag: int = 0) -> Work:
        ...
    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Work:
        """
        output [n], input [size * n].
        """
    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Work:
        ...
    @property
    def group_rank(self) -> int:
        ...
    @property
    def is_stream_ordered(self) -> bool:
        """
        Collectives run on streams of a device.
        """
    @property
    def name(self) -> str:
        ...
    @property
    def size(self) -> int:
        ...
class PeerSockets:
    """
    TCP connections from this process to other ranks, opened when they are first used and shared by all groups.
    """
    def __init__(self, global_rank: int, *, address: str, secret: bytes, world_size: int) -> None:
        ...
    def close(self) -> None:
        ...
    def set_addresses(self, addresses: collections.abc.Sequence[str]) -> None:
        """
        Those of all ranks.
        """
    @property
    def address(self) -> str:
        """
        Where others reach this process.
        """
    @property
    def num_connections(self) -> int:
        """
        Opened or accepted so far.
        """
class FlightWatch:
    """
    Watches collectives of devices, for which no host waits; see comm/flight_watch.h.
    """
    def __init__(self, board: FaultBoard, *, timeout_s: float, report_after_s: float) -> None:
        ...
    @property
    def num_in_flight(self) -> int:
        ...
class DeviceMeter:
    """
    How far a device is with what it was asked for.
    """
    def __init__(self, device: str) -> None:
        ...
    def count_on(self, board: FaultBoard) -> None:
        """
        What the device gets done is progress of this process.
        """
    def mark(self) -> None:
        """
        A task ends here, on the current stream.
        """
class ActivationStore:
    """
    Keeps inputs of recomputed calls in host memory.
    """
    def __init__(self, device: str, horizon: int, min_bytes: int = 1048576) -> None:
        ...
    def stats(self) -> dict[str, typing.Any]:
        ...
class RandomState:
    """
    A copy of the default random generators.
    """
    @staticmethod
    def capture(device: str) -> RandomState:
        """
        Copies the CPU's generator and the device's.
        """
    def restore(self) -> None:
        ...
class TaskScope:
    """
    Context manager: what the thread works on.
    """
    def __enter__(self) -> None:
        ...
    def __exit__(self, *args: typing.Any) -> None:
        ...
    def __init__(self, step: int, mb: int) -> None:
        ...
class SharedMemory:
    """
    Memory shared with other ranks of this host.
    """
    @property
    def peers(self) -> list[int]:
        """
        Global ranks that it is shared with.
        """
class Mailbox:
    """
    Messages of all channels between all ranks.
    """
    def __init__(self, world: Communicator, board: FaultBoard, shared_memory: SharedMemory | None = None, device: str = 'cpu', *, machine: str = '', pipeline: int = 0, lane: str = 'auto', slot_bytes: int = 134217728, make_way: collections.abc.Callable[..., typing.Any] | None = None, flights: FlightWatch | None = None, nccl_host: str = '', timeout_s: float = 1800.0, sockets: PeerSockets | None = None) -> None:
        ...
    def close(self, timeout_s: float = 5.0) -> None:
        """
        Sends what is posted, then ends all threads.
        """
    def lanes(self) -> list[tuple[int, int, str, str]]:
        """
        (source, destination, lane, why) of each pair of ranks that send each other tensors; empty where these travel in messages.
        """
    def num_unsent(self) -> int:
        ...
    def progress(self) -> int:
        ...
    def stats(self) -> dict[str, typing.Any]:
        ...
class LinkProbe:
    """
    Measures the way to another rank.
    """
    def __init__(self, mailbox: Mailbox, board: FaultBoard) -> None:
        ...
    def measure(self, peer: int, num_bytes: int, repeats: int, timeout_s: float = 60.0, device: str = 'cpu') -> list[tuple[float, float]]:
        """
        (one way, round trip) in seconds of each message; the peer has a probe too.
        """
class ObjectExchange:
    """
    Byte strings between ranks; every call blocks.
    """
    def __init__(self, mailbox: Mailbox, board: FaultBoard, timeout_s: float = 1800.0) -> None:
        ...
    def all_gather(self, ranks: collections.abc.Sequence[int], data: bytes, what: str = 'all_gather') -> list[bytes]:
        """
        Collective: the bytes of all, in the order of ranks.
        """
    def barrier(self, ranks: collections.abc.Sequence[int], what: str = 'barrier') -> None:
        """
        Collective.
        """
    def broadcast(self, ranks: collections.abc.Sequence[int], data: bytes) -> None:
        """
        By the sender only; returns when all others have called recv.
        """
    def recv(self, src: int) -> bytes:
        """
        The next object that src sent or broadcast.
        """
    def send(self, dst: int, data: bytes) -> None:
        """
        Returns when dst has called recv.
        """
    def set_timeout(self, timeout_s: float) -> None:
        ...
class TokenRoutes:
    """
    Which tokens go to which ranks; see tensor_parallel/token_exchange.h.
    """
    @property
    def group_tokens(self) -> int:
        ...
    @property
    def num_pairs(self) -> int:
        ...
    @property
    def num_tokens(self) -> int:
        ...
    @property
    def received(self) -> list[int]:
        ...
    @property
    def sent(self) -> list[int]:
        ...
    @property
    def was_alone(self) -> bool:
        ...
class TensorParallelGroup:
    """
    Ranks that split layers, and the regions of autograd at the borders; see tensor_parallel/{group,regions,vocabulary}.h. `sizes` are the parts of the ranks along a dim; empty: equal ones.
    """
    def __init__(self, communicator: Communicator | None, group_rank: int, size: int, *, control: Communicator | None = None, faults: FaultBoard | None = None, ranks: collections.abc.Sequence[int] = [], timeout_s: float = 1800.0) -> None:
        ...
    def all_say(self, says: bool, what: str) -> bool:
        """
        Collective; only hosts talk.
        """
    def combine(self, y: torch.Tensor, routes: TokenRoutes) -> torch.Tensor:
        ...
    def common_seed(self) -> int:
        """
        Collective.
        """
    def copy(self, x: torch.Tensor) -> torch.Tensor:
        ...
    def dispatch(self, tensors: collections.abc.Sequence[torch.Tensor], routes: TokenRoutes) -> list[torch.Tensor]:
        ...
    def exchange(self, x: torch.Tensor, split_dim: int, concat_dim: int, split_sizes: collections.abc.Sequence[int] = [], concat_sizes: collections.abc.Sequence[int] = []) -> torch.Tensor:
        ...
    def gather(self, x: torch.Tensor, dim: int, sizes: collections.abc.Sequence[int] = [], sum_grads: bool = True) -> torch.Tensor:
        ...
    def gathered_linears(self, x: torch.Tensor, weights: collections.abc.Sequence[torch.Tensor], biases: collections.abc.Sequence[torch.Tensor | None], dim: int | None, sizes: collections.abc.Sequence[int] = []) -> list[torch.Tensor]:
        ...
    def own_seed(self) -> int:
        ...
    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        ...
    def reduce_scatter(self, x: torch.Tensor, dim: int, sizes: collections.abc.Sequence[int] = []) -> torch.Tensor:
        ...
    def route(self, experts: torch.Tensor, sizes: collections.abc.Sequence[int]) -> TokenRoutes:
        """
        Collective; waits for the numbers of a device.
        """
    def scatter(self, x: torch.Tensor, dim: int, sizes: collections.abc.Sequence[int] = []) -> torch.Tensor:
        ...
    def seed_of_first(self, seed: int) -> int:
        """
        Collective.
        """
    def traffic(self) -> tuple[typing.Any, ...]:
        """
        (collectives, bytes that this rank had to send) so far.
        """
    def vocabulary_cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor, *, begin: int, vocab_size: int, ignore_index: int = -100, label_smoothing: float = 0.0) -> torch.Tensor:
        ...
    @property
    def group_rank(self) -> int:
        ...
    @property
    def size(self) -> int:
        ...
class PromisedWork(Work):
    """
    An operation that somebody else carries out.
    """
    def __init__(self, finish: collections.abc.Callable[..., typing.Any]) -> None:
        ...
    def complete(self) -> None:
        ...
class HookedGroup(Communicator):
    """
    A group in which somebody else sums buckets of gradients; see gradients/hooked_group.h.
    """
    def __init__(self, group: Communicator, hook: collections.abc.Callable[..., typing.Any]) -> None:
        ...
    def set_buckets(self, flats: collections.abc.Sequence[torch.Tensor]) -> None:
        ...
class ReductionGroup:
    """
    Over which ranks a gradient is summed.
    
    Members:
    
      DP
    
      RDP
    """
    DP: typing.ClassVar[ReductionGroup]
    RDP: typing.ClassVar[ReductionGroup]
    __members__: typing.ClassVar[dict[str, ReductionGroup]]
    def __eq__(self, other: object) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class ParameterRecord:
    """
    What all parts of the library know about a parameter that this rank holds.
    """
    def __init__(self, index: int, name: str, shape: collections.abc.Sequence[int], dtype: torch.dtype, *, divisor: float = 1.0, interval: ShardInterval | None = None, ties: collections.abc.Sequence[str] = [], group: ReductionGroup = ReductionGroup.DP, accumulation_dtype: torch.dtype | None = None) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def accumulation_dtype(self) -> torch.dtype:
        ...
    @property
    def divisor(self) -> float:
        ...
    @property
    def dtype(self) -> torch.dtype:
        ...
    @property
    def group(self) -> ReductionGroup:
        ...
    @property
    def index(self) -> int:
        ...
    @property
    def interval(self) -> ShardInterval:
        ...
    @property
    def local_shape(self) -> list[int]:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def shape(self) -> list[int]:
        ...
    @property
    def ties(self) -> list[str]:
        ...
class ShardLayout:
    """
    How a bucket is divided over a shard group.
    
    Members:
    
      EQUAL_CUT
    
      PER_PARAMETER
    """
    EQUAL_CUT: typing.ClassVar[ShardLayout]
    PER_PARAMETER: typing.ClassVar[ShardLayout]
    __members__: typing.ClassVar[dict[str, ShardLayout]]
    def __eq__(self, other: object) -> bool:
        ...
    def __getstate__(self) -> int:
        ...
    def __hash__(self) -> int:
        ...
    def __index__(self) -> int:
        ...
    def __init__(self, value: int) -> None:
        ...
    def __int__(self) -> int:
        ...
    def __ne__(self, other: typing.Any) -> bool:
        ...
    def __repr__(self) -> str:
        ...
    def __setstate__(self, state: int) -> None:
        ...
    def __str__(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def value(self) -> int:
        ...
class ShardSegment:
    """
    Elements [begin, begin + numel) of a parameter lie at flat_offset of the flat bucket.
    """
    @property
    def begin(self) -> int:
        ...
    @property
    def flat_offset(self) -> int:
        ...
    @property
    def numel(self) -> int:
        ...
    @property
    def record_idx(self) -> int:
        ...
class ShardHolding:
    """
    What one rank holds of a parameter, and where in its shard.
    """
    @property
    def begin(self) -> int:
        ...
    @property
    def numel(self) -> int:
        ...
    @property
    def offset(self) -> int:
        ...
    @property
    def record_idx(self) -> int:
        ...
    @property
    def room(self) -> int:
        ...
class ShardedBucket:
    """
    A bucket of num_shards * shard_numel elements; see gradients/shard_layout.h.
    """
    @property
    def accumulation_dtype(self) -> torch.dtype:
        ...
    @property
    def dtype(self) -> torch.dtype:
        ...
    @property
    def holdings(self) -> list[list[ShardHolding]]:
        ...
    @property
    def num_shards(self) -> int:
        ...
    @property
    def segments(self) -> list[ShardSegment]:
        ...
    @property
    def shard_numel(self) -> int:
        ...
class ReducerStats:
    @property
    def flat_bytes(self) -> int:
        ...
    @property
    def num_early_buckets(self) -> int:
        ...
    @property
    def num_early_hops(self) -> int:
        ...
    @property
    def num_late_parameters(self) -> int:
        ...
    @property
    def num_reductions(self) -> int:
        ...
    @property
    def num_rounds(self) -> int:
        ...
    @property
    def peak_flat_bytes(self) -> int:
        ...
class Sharding:
    """
    How gradients are reduced where each rank keeps a shard; see gradients/shard_reduction.h.
    """
    def __init__(self, layout: ShardLayout, shard: Communicator, *, further: collections.abc.Sequence[Communicator] = [], every_microbatch: bool = False) -> None:
        ...
class Reducer(MicrobatchListener):
    """
    Collects gradients in microbatch order and averages them over the data-parallel ranks; see gradients/reducer.h.
    """
    def __init__(self, params: collections.abc.Sequence[torch.Tensor], records: collections.abc.Sequence[ParameterRecord], dp: Communicator | None, *, targets: collections.abc.Sequence[torch.Tensor | None] | None = None, sharding: Sharding | None = None, control: Communicator | None = None, faults: FaultBoard | None = None, dp_ranks: collections.abc.Sequence[int] = [], bucket_cap_bytes: int = 26214400, overlap: bool = True, average_over_microbatches: bool = True, num_batches: float = 1.0, passes_per_reduction: int = 1, expects_one_per_microbatch: bool = True, timeout_s: float = 1800.0) -> None:
        """
        Collective over `dp`, which may be None. `control` has the same ranks and serves tensors of the host; needed where `dp` does not.
        """
    def begin_step(self, num_microbatches: int, may_overlap: bool = True, are_shares: bool = False) -> None:
        ...
    def cancel_step(self) -> None:
        """
        Closes a step that failed or had no backward; not collective.
        """
    def end_step(self) -> None:
        """
        Reduces the rest and sets `.grad`. Collective over `dp`.
        """
    def finish_microbatch(self, mb: int) -> None:
        """
        The backward of `mb` is over on this rank.
        """
    def flat(self, bucket_idx: int) -> torch.Tensor:
        """
        Flat gradient tensor of a bucket, or this rank's shard of it; valid between steps.
        """
    @property
    def in_step(self) -> bool:
        ...
    @property
    def num_buckets(self) -> int:
        ...
    @property
    def records(self) -> list[ParameterRecord]:
        ...
    @property
    def stats(self) -> ReducerStats:
        ...
class ParameterStoreStats:
    @property
    def gathered_bytes(self) -> int:
        ...
    @property
    def live_elements(self) -> int:
        ...
    @property
    def num_collectives(self) -> int:
        ...
    @property
    def num_deviations(self) -> int:
        ...
    @property
    def num_gathers(self) -> int:
        ...
    @property
    def num_hits(self) -> int:
        ...
    @property
    def peak_live_elements(self) -> int:
        ...
    @property
    def persistent_elements(self) -> int:
        ...
class ParameterScope:
    """
    See parameters/parameter_scope.h.
    """
    def leave(self, results: collections.abc.Sequence[torch.Tensor] = []) -> None:
        ...
class ParameterStore:
    """
    Sharded parameters and when they are whole; see parameters/parameter_store.h.
    """
    def __init__(self, params: collections.abc.Sequence[torch.Tensor], shards: collections.abc.Sequence[torch.Tensor], units: collections.abc.Sequence[collections.abc.Sequence[int]], names: collections.abc.Sequence[str], group: Communicator | None, *, across: Communicator | None = None, within: Communicator | None = None, max_live_elements: int = 1152921504606846976, persistence_threshold: int = 0, num_ahead: int = 1, faults: FaultBoard | None = None, ranks: collections.abc.Sequence[int] = [], timeout_s: float = 1800.0) -> None:
        ...
    def abandon_pass(self) -> None:
        ...
    def begin_pass(self, kind: int) -> None:
        ...
    def end_pass(self) -> None:
        ...
    def enter(self, units: collections.abc.Sequence[int], is_forward: bool = True) -> ParameterScope:
        """
        Holds units until `leave`. Collective.
        """
    def gather_one(self, param_idx: int) -> torch.Tensor:
        """
        A copy of a whole parameter. Collective.
        """
    def mark_stale(self) -> None:
        """
        The shards have got other values.
        """
    def read(self, unit: int) -> None:
        """
        A parameter of the unit is about to be read.
        """
    @property
    def stats(self) -> ParameterStoreStats:
        ...
class FlatGathers:
    """
    Brings updated parts of flat parameters to all ranks of a shard group, while other work goes on; see parameters/flat_gathers.h.
    """
    def __init__(self, flats: collections.abc.Sequence[torch.Tensor], shard: Communicator, *, faults: FaultBoard | None = None, ranks: collections.abc.Sequence[int] = [], timeout_s: float = 1800.0) -> None:
        ...
    def finish(self, timeout_s: float) -> None:
        """
        Waits at the end of a run, when other ranks may have left.
        """
    def launch(self) -> None:
        """
        Collective.
        """
    def wait(self, flat_idxs: collections.abc.Sequence[int]) -> None:
        ...
    def wait_all(self) -> None:
        ...
    @property
    def num_gathers(self) -> int:
        ...
    @property
    def num_overlapped(self) -> int:
        ...
    @property
    def pending(self) -> bool:
        ...
class SliceRead:
    """
    num_runs copies of run_length elements out of one stored slice.
    """
    @property
    def dst_offset(self) -> int:
        ...
    @property
    def dst_stride(self) -> int:
        ...
    @property
    def num_runs(self) -> int:
        ...
    @property
    def run_length(self) -> int:
        ...
    @property
    def source_idx(self) -> int:
        ...
    @property
    def src_offset(self) -> int:
        ...
    @property
    def src_stride(self) -> int:
        ...
class Part:
    """
    Elements [begin, begin + numel) of a flattened slice.
    """
    def __init__(self, interval: ShardInterval, begin: int, numel: int, view: collections.abc.Sequence[int] = []) -> None:
        ...
    def __repr__(self) -> str:
        ...
    @property
    def begin(self) -> int:
        ...
    @property
    def interval(self) -> ShardInterval:
        ...
    @property
    def numel(self) -> int:
        ...
    @property
    def view(self) -> list[int]:
        ...
class FileWriter:
    """
    Writes a file through buffers and a thread.
    """
    def __init__(self, path: str, buffer_bytes: int, num_buffers: int, chunk_bytes: int) -> None:
        ...
    def abandon(self) -> None:
        ...
    def append(self, data: bytes) -> None:
        ...
    def append_tensor(self, tensor: torch.Tensor) -> None:
        ...
    def finish(self) -> tuple[int, list[int]]:
        """
        Number of bytes, and the CRC-32 of each chunk.
        """
    def take_crc32(self) -> int:
        ...
    @property
    def bytes_written(self) -> int:
        ...
    @property
    def position(self) -> int:
        ...
class FileReader:
    """
    Reads ranges of a file and checks their chunks.
    """
    def __init__(self, path: str, num_bytes: int, chunk_bytes: int, crc32s: collections.abc.Sequence[int]) -> None:
        ...
    def read(self, offset: int, into: torch.Tensor) -> None:
        ...
    def read_slice(self, read: SliceRead, block_offset: int, into: torch.Tensor) -> None:
        ...
class Timeline:
    """
    Records what a rank does; see pipeline/timeline.h.
    """
    @staticmethod
    def now_ns() -> int:
        """
        The clock of the events.
        """
    def __init__(self, device: str = 'cpu') -> None:
        ...
    def begin_run(self, backward: bool, mb: int) -> None:
        """
        A step body runs; for ranks without a server.
        """
    def begin_step(self, step: int, num_microbatches: int) -> None:
        ...
    def discard(self) -> None:
        """
        Forgets what was recorded, and waits for no device.
        """
    def end_run(self) -> None:
        ...
    def end_step(self) -> None:
        ...
    def start(self, capacity: int) -> None:
        """
        Begins a recording that keeps the youngest events.
        """
    def stop(self) -> None:
        ...
    def take(self) -> tuple[typing.Any, ...]:
        """
        (events, number of older ones that were dropped)
        """
    @property
    def is_on(self) -> bool:
        ...
class Server:
    """
    One rank's part in the pipeline; see pipeline/server.h.
    """
    def __init__(self, mailbox: Mailbox, faults: FaultBoard, *, global_rank: int, pp_ranks: collections.abc.Sequence[int], order_ranks: collections.abc.Sequence[int], policy: str, actions: str | None, num_chunks: int, active_microbatches: int, deterministic: bool, device: str, timeout_s: float, timeline: Timeline | None = None, device_meter: DeviceMeter | None = None) -> None:
        ...
    def add_modules(self, names: collections.abc.Sequence[str], chunk_idxs: collections.abc.Sequence[int], depth: int = -1) -> int:
        """
        Takes in a model, between steps; returns its first module's id.
        """
    def await_backward(self) -> None:
        ...
    def await_output(self) -> tuple[typing.Any, ...]:
        """
        Others: the model's output.
        """
    def begin_backward(self) -> None:
        ...
    def begin_step(self, name: str, num_microbatches: int, words: str = '') -> tuple[int, str]:
        """
        Opens the next step; returns the driver's number of microbatches and words.
        """
    def close(self) -> None:
        ...
    def compute(self, name: str, handles: collections.abc.Sequence[torch.Tensor], with_scalar: bool, scalar: float) -> torch.Tensor:
        """
        Arithmetic at the home of the handles.
        """
    def data_bytes_to(self) -> dict[int, int]:
        """
        Bytes of tensors sent since the beginning, by global rank.
        """
    def end_backward(self) -> None:
        ...
    def executed_actions(self) -> str:
        """
        The last step in the text form of a schedule.
        """
    def executed_order(self) -> list[str]:
        """
        Tasks of the last step in the order in which they began.
        """
    def fetch(self, handle: torch.Tensor) -> torch.Tensor:
        """
        The data, not to be changed.
        """
    def materialize(self, handle: torch.Tensor) -> torch.Tensor:
        """
        The data as a tensor behind the handle's graph.
        """
    def publish_output(self, structure: bytes, tensors: collections.abc.Sequence[torch.Tensor]) -> None:
        """
        Driver: the model's output for the others.
        """
    def remote_call(self, owner_global_rank: int, module_id: int, training: bool, structure: bytes, mode: str, tensors: collections.abc.Sequence[torch.Tensor]) -> tuple[typing.Any, ...]:
        """
        Has a module run on its owner: structure and handles of the result, and which arguments it changed (their handles are the last).
        """
    def run_step(self, num_microbatches: int, seed: int, body: collections.abc.Callable[..., typing.Any]) -> None:
        """
        Runs body(mb) for each microbatch and serves.
        """
    def seeds_of_next_calls(self, module_ids: collections.abc.Sequence[int]) -> list[int]:
        """
        Of modules on other ranks that are called one by one.
        """
    def set_error_reporter(self, arg0: collections.abc.Callable[..., typing.Any]) -> None:
        ...
    def set_forward_handler(self, arg0: collections.abc.Callable[..., typing.Any]) -> None:
        """
        handler(module_id, mb, training, structure, tensors) -> (structure, tensors); runs a module on its owner.
        """
    def set_handle_factory(self, arg0: collections.abc.Callable[..., typing.Any]) -> None:
        """
        factory(sizes, dtype) -> tensor without data
        """
    def set_microbatch_done(self, arg0: collections.abc.Callable[..., typing.Any]) -> None:
        ...
    def set_microbatch_listeners(self, listeners: collections.abc.Sequence[MicrobatchListener]) -> None:
        """
        Objects that hear of the end of each microbatch, before Python does.
        """
    def skip_calls(self, num_calls: int) -> None:
        """
        Counts calls that were made as a part of another one.
        """
    def stats(self) -> dict[str, typing.Any]:
        ...
    @property
    def is_driver(self) -> bool:
        ...
    @property
    def module_names(self) -> list[str]:
        ...
class ViewOfArgument:
    @property
    def argument_idx(self) -> int:
        ...
    @property
    def offset(self) -> int:
        ...
    @property
    def result_idx(self) -> int:
        ...
    @property
    def sizes(self) -> list[int]:
        ...
    @property
    def strides(self) -> list[int]:
        ...
class RefState:
    """
    What is known of a handle.
    """
    @property
    def home_rank(self) -> int:
        ...
    @property
    def is_of_this_step(self) -> bool:
        ...
def agree_on_maxima(values: collections.abc.Sequence[int], group: Communicator, *, what: str, faults: FaultBoard | None = None, ranks: collections.abc.Sequence[int] = [], timeout_s: float = 1800.0) -> list[int]:
    """
    The largest of each integer over a group of the host. Collective.
    """
def broadcast_coalesced(tensors: collections.abc.Sequence[torch.Tensor], group: Communicator, root: int, *, faults: FaultBoard | None = None, ranks: collections.abc.Sequence[int] = [], timeout_s: float = 1800.0) -> None:
    """
    Overwrites tensors with those of group rank `root`. Collective.
    """
def check_wishes(tree: ModuleTree, num_partitions: int) -> None:
    """
    Raises a ValueError for wishes that contradict each other.
    """
def complete_partition(tree: ModuleTree, num_partitions: int, partition_idxs: collections.abc.Sequence[int], num_chunks: int, chunk_idxs: collections.abc.Sequence[int]) -> Assignment:
    """
    Assignment from the places of units.
    """
def connect_shared_memory(world: Communicator, board: FaultBoard, *, machine: str, enabled: bool = True, ring_bytes: int = 8388608, timeout_s: float = 1800.0) -> SharedMemory:
    """
    Collective: finds the ranks that can share memory.
    """
def copy_tensor(into: torch.Tensor, source: torch.Tensor) -> None:
    """
    Copies a tensor into one on the CPU with the same layout.
    """
def crc32(data: bytes, crc: int = 0) -> int:
    """
    As zlib.crc32.
    """
def current_microbatch() -> int:
    """
    The microbatch that this thread works on; -1 outside of steps.
    """
def current_step() -> int:
    """
    The step that this thread works on; -1 outside of steps.
    """
def evaluate_partition(tree: ModuleTree, assignment: Assignment, options: PartitionOptions) -> Evaluation:
    """
    What an assignment costs.
    """
def exchange_layer_name(name: str) -> str:
    """
    Names the layer that this thread runs, which has to be one on all ranks of a tensor-parallel group. Returns the name before.
    """
def executed_actions(order: collections.abc.Sequence[str], chunk_of_module: collections.abc.Mapping[int, int]) -> str:
    """
    Tasks of `executed_order` in the text form of a schedule.
    """
def explain_placement(tree: ModuleTree, assignment: Assignment, node_idx: int) -> Placement:
    """
    Rule by which a node is where it is, and the node it depends on.
    """
def gather_numbers(numbers: torch.Tensor, group: Communicator, *, what: str, faults: FaultBoard | None = None, ranks: collections.abc.Sequence[int] = [], timeout_s: float = 1800.0) -> torch.Tensor:
    """
    Numbers of all ranks, [size, n] of [n], by group rank, on the same device, for which the host does not wait. Collective.
    """
def host_memory_stats() -> dict[str, typing.Any]:
    """
    Blocks that came from the system and that were used again; bytes in use and free; of the last time that there was no memory, what was asked for and was in use.
    """
def in_context() -> bool:
    """
    True inside a step body or the service of a request.
    """
def is_recomputing() -> bool:
    """
    Whether this thread runs a checkpointed function for its backward.
    """
def lay_out_by_hosts(hosts: collections.abc.Sequence[str], group_rank: int) -> HostLayout:
    """
    `hosts` by group rank.
    """
def link_view(view: torch.Tensor, base: torch.Tensor, spread: collections.abc.Callable[..., typing.Any]) -> None:
    ...
def make_assignment(tree: ModuleTree, num_partitions: int, partition_idxs: collections.abc.Sequence[int], num_chunks: int = 1, chunk_idxs: collections.abc.Sequence[int] = []) -> Assignment:
    """
    Assignment from one given partition, and chunk, per node.
    """
def make_c10d_communicator(backend: torch._C._distributed_c10d.Backend, name: str, end: collections.abc.Callable[..., typing.Any] | None = None) -> Communicator:
    """
    Communicator over a torch.distributed Backend, such as ProcessGroupGloo, that nothing else uses. `end` ends what it has on its way, where its base class has no `abort`.
    """
def make_grad_bucket(index: int, count: int, flat: torch.Tensor, offsets: collections.abc.Sequence[int], params: collections.abc.Sequence[torch.Tensor]) -> torch._C._distributed_c10d.GradBucket:
    """
    A torch.distributed.GradBucket; without parameters it is one gradient.
    """
def make_hierarchical_communicator(flat: Communicator, *, scatter: Communicator, across: Communicator, gather: Communicator, is_host_by_host: bool) -> Communicator:
    """
    `flat`, whose sums go within hosts, across them, and within them; of host tensors. See comm/hierarchical_communicator.h.
    """
def make_mpi_group(global_ranks: collections.abc.Sequence[int]) -> Communicator:
    """
    Communicator over some of them. Collective over these.
    """
def make_mpi_world() -> Communicator:
    """
    Communicator over all processes of the MPI job; starts MPI. Collective.
    """
def make_policy(name: str) -> Policy:
    ...
def make_socket_communicator(sockets: PeerSockets, name: str, global_ranks: collections.abc.Sequence[int]) -> Communicator:
    """
    Communicator of a group over the connections of this process; CPU tensors. The name is used once.
    """
def mix_seed(seed: int, value: int) -> int:
    """
    A seed made of two numbers (splitmix64).
    """
def move_in_partition(tree: ModuleTree, assignment: Assignment, node_idx: int, partition_idx: int) -> Assignment:
    """
    The assignment with a subtree on another partition.
    """
def mpi_available() -> bool:
    """
    Whether this build has the MPI adapter.
    """
def mpi_finalize() -> None:
    """
    Ends MPI if smp started it. Collective.
    """
def normalize_schedule(text: str) -> str:
    """
    Parses and prints.
    """
def own_address(interface: str, towards: str) -> str:
    """
    The numeric address by which other hosts reach this one: that of an interface, or of the way to a host.
    """
def plan_part_reads(shape: collections.abc.Sequence[int], stored: collections.abc.Sequence[Part], wanted: Part) -> list[SliceRead]:
    """
    The reads that make up a part of a tensor from stored parts.
    """
def plan_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> str:
    """
    The plan for equal stages, one line per rank.
    """
def plan_shards(records: collections.abc.Sequence[ParameterRecord], bucket_cap_bytes: int, num_shards: int, layout: ShardLayout) -> list[ShardedBucket]:
    """
    Buckets of the records, divided over a shard group.
    """
def policy_names() -> list[str]:
    ...
def rank_prefix() -> str:
    """
    Text in front of every error and log line of this process.
    """
def recompute(function: collections.abc.Callable[..., typing.Any], inputs: collections.abc.Sequence[torch.Tensor], *, needs_grad: bool, preserve_random_state: bool, device: str, store: ActivationStore | None) -> list[torch.Tensor]:
    """
    Runs function(tensors) -> tensors without a graph, and again in backward.
    """
def ref_state(tensor: torch.Tensor) -> RefState | None:
    """
    Of a handle; None for an ordinary tensor.
    """
def release_host_memory() -> None:
    """
    All free memory of the host goes back to the system.
    """
def release_idle_host_memory() -> None:
    """
    Memory that was not used since the call before the last one goes back.
    """
def seed_generators(seed: int, device: str) -> None:
    """
    Seeds the default generators of the CPU and of the device.
    """
def set_details_file(path: str) -> None:
    """
    Names the file that takes what is too long for a terminal, such as stacks; empty: the terminal gets it.
    """
def set_rank_prefix(prefix: str) -> None:
    """
    Sets `rank_prefix`, for instance "[global_rank 5 | pp 1] ".
    """
def set_tensor_parallel_alone(is_alone: bool) -> bool:
    """
    Makes the regions of this thread communicate with nobody. Returns the value before.
    """
def share_collectives(inner: Communicator, *, machine: str, enabled: bool, faults: FaultBoard | None = None, ranks: collections.abc.Sequence[int] = [], timeout_s: float = 1800.0) -> Communicator:
    """
    Collectives through memory that all ranks of `inner` map, or `inner` itself where they cannot. Collective.
    """
def share_ref(handle: torch.Tensor, source: torch.Tensor) -> None:
    """
    Makes a tensor without data stand for what another handle stands for.
    """
def simulate_lists(stages: collections.abc.Sequence[StageCost], boundaries: collections.abc.Sequence[BoundaryCost], num_microbatches: int, active_microbatches: int, schedule: str) -> SimulationResult:
    """
    A step in which each rank runs its line of a schedule.
    """
def simulate_policy(stages: collections.abc.Sequence[StageCost], boundaries: collections.abc.Sequence[BoundaryCost], num_microbatches: int, active_microbatches: int, policy: str) -> SimulationResult:
    """
    A step under a policy; 0 active microbatches ask the policy.
    """
def solve_partition(tree: ModuleTree, options: PartitionOptions) -> Assignment:
    """
    Balanced assignment; deterministic.
    """
def unit_places(tree: ModuleTree) -> list[int]:
    """
    Per node the first node of its unit; -1 for what follows from units.
    """
def use_host_allocator(is_used: bool) -> None:
    """
    From here on large CPU tensors of this process stay out of the C library's heap; or all are made as they were before.
    """
def vocabulary_embedding(ids: torch.Tensor, table: torch.Tensor, begin: int, padding_id: int = -1) -> torch.Tensor:
    ...
def watch_collectives(inner: Communicator, board: FaultBoard, ranks: collections.abc.Sequence[int], flights: FlightWatch | None = None) -> Communicator:
    """
    `inner`, whose collectives the board numbers, so that one that all ranks have entered is not taken for a deadlock. Those of a device are watched by `flights`.
    """
DEFAULT_POLICY: str = 'interleaved'
MIN_SECRET_BYTES: int = 32
