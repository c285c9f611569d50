"""Trains as tests/clients/test_trainer.py does, in ranks of a real launcher: FOLDER CONFIG."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.clients.test_trainer import Job, train

folder, config = sys.argv[1:]
rank = int(os.environ["RANK"])
result = train(rank, Job(folder, json.loads(config), drops_labels=True))
Path(folder, f"result_{rank}.json").write_text(json.dumps(result))
