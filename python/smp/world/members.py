"""The ranks of a job, as they have met: what connects them, now and after a failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist

import smp._C as _C
from smp.world.placement_map import placement_map, placement_words
from smp.world.processes import has_ended
from smp.world.rank import Rank
from smp.world.recruits import Recruits
from smp.world.rendezvous import Hello
from smp.world.settings import device_of
from smp.world.sockets import with_own_connection
from smp.world.spares import Place, Spares, Waiting, hello_of
from smp.world.survivors import Survivors


@dataclass
class Members:
    """The hellos of ranks that have met, and what connects them.

    Attributes:
        store: keys of this init, for the connections of the present ranks. A thread that has been
            left behind may use those of former ranks (`connecting`), so each set has its own.
        hellos: hello of each rank, index = global rank.
        own_host: address of this machine as others see it, if the hello does not have it.
        secret: secret of this job from the environment; None: the job draws one.
        launched: number that the launcher gave to each rank, index = global rank.
        generation: number of times that the ranks were connected again.
    """

    store: dist.Store
    hellos: list[Hello]
    own_host: str
    secret: bytes | None
    launched: list[int]
    generation: int = 0

    @property
    def is_one_machine(self) -> bool:
        return len({hello.machine for hello in self.hellos}) == 1

    @property
    def keys(self) -> dist.Store:
        """Keys of the present ranks alone."""
        return self._keys_in(self.store)

    @cached_property
    def _apart(self) -> dist.Store:
        """Keys of this init for the agreement, which goes on while connections are made."""
        return with_own_connection(self.store)

    def _keys_in(self, store: dist.Store) -> dist.Store:
        if not self.generation:
            return store
        return dist.PrefixStore(f"regroup/{self.generation}", store)

    def placement(self, grid: _C.ProcessGrid) -> tuple[list[str], str]:
        """Returns lines on the places of the ranks, and a map of them.

        Args:
            grid: grid of the ranks.
        """
        hosts = [other.host for other in self.hellos]
        devices = [
            str(device_of(other.device, hosts[:rank].count(other.host), other.num_devices))
            for rank, other in enumerate(self.hellos)
        ]
        places = [grid.coordinates(rank) for rank in range(len(self.hellos))]
        coordinates = [(at.pp, at.tp, at.cp, at.rdp) for at in places]
        words = placement_words(hosts, devices, coordinates)
        return list(words), placement_map(hosts, devices, coordinates, grid.placement)

    def watch(self, rank: Rank) -> Survivors:
        """Returns what watches for failures of these ranks, and for further ones.

        Args:
            rank: rank of this process among them.
        """
        keys = self._keys_in(self._apart)
        if rank.config.on_failure != "spare":
            return Survivors(keys, rank, self._has_ended)
        first, hosts = rank.launch.first_size, [hello.host for hello in self.hellos]
        waiting = Waiting(self._apart, range(first, first + (rank.launch.spares or 0)))
        place = Place(0, self.generation, self.launched, self.hellos, rank.keepers, hosts)
        recruits = None
        if rank.may_grow and rank.global_rank == 0:
            recruits = Recruits(waiting, rank.grid, place)
        spares = Spares(waiting, keys, place, rank.patience_s)
        return Survivors(keys, rank, self._has_ended, spares, recruits)

    def _has_ended(self, global_rank: int) -> bool:
        hello = self.hellos[global_rank]
        return has_ended(hello.pid, hello.process_space)

    def become(self, kept: Sequence[int], newcomers: Mapping[int, int]) -> None:
        """Takes over the ranks that go on.

        Args:
            kept: present global ranks, index = global rank from now on; -1: a newcomer.
            newcomers: number of the process that takes a place, by global rank from now on.
        """
        self.generation, run = self.generation + 1, self.hellos[0].run
        self.store = with_own_connection(self._apart)
        hellos = [
            hello_of(self.store, newcomers[place]) if rank < 0 else self.hellos[rank]
            for place, rank in enumerate(kept)
        ]
        self.hellos = [replace(hello, world_size=len(kept), run=run) for hello in hellos]
        self.launched = [
            newcomers[place] if rank < 0 else self.launched[rank] for place, rank in enumerate(kept)
        ]
