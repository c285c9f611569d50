"""The order of `smp verify` to a job, in a file that `SMP_VERIFY` names."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Order:
    """The recording that `smp verify` orders from one job.

    Attributes:
        folder: folder of the records of this job.
        steps: updates of an optimizer after which the script ends.
        is_exact: models and inputs are cast to float64.
        replay: folder of another job, whose inputs of all data-parallel ranks this one process
            computes with; None: the process uses its own inputs.
    """

    folder: str
    steps: int
    is_exact: bool = False
    replay: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: str) -> Order:
        """Reads the order in a file.

        Raises:
            ValueError: the file contains no order.
        """
        try:
            return cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"smp: SMP_VERIFY={path!r} is no file that `smp verify` has written ({error}); "
                "unset the variable, which is for `smp verify` alone"
            ) from None
