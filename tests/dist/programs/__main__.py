"""Replays a program: ``python -m tests.dist.programs '<text>' [delay seed]``."""

from __future__ import annotations

import sys

from tests.dist.pool import Pool
from tests.dist.programs.language import Program
from tests.dist.programs.running import compare, run_distributed, run_plain


def main() -> None:
    program = Program.from_text(sys.argv[1])
    for index, (block, owner) in enumerate(zip(program.blocks, program.owners, strict=True)):
        print(f"block {index} on {owner}: children {block.children}, tie {block.tie}")
        for line in block.code:
            print("   ", *line)
        print("    ->", block.result)
    plain = run_plain(program)
    delay_seed = int(sys.argv[2]) if len(sys.argv) > 2 else None
    pool = Pool()
    try:
        results = pool.run(program.pp, run_distributed, [program.text()], delay_seed)
        compare([result[0] for result in results], plain)
    finally:
        pool.close()
    print("equal to one process")


if __name__ == "__main__":
    main()
