"""Random programs: module trees with random code, as values that can be printed and replayed.

* `language`: what a program is, and its text form;
* `interpreter`: the ``nn.Module`` that runs one;
* `builder`, `strategy`: hypothesis makes programs that plain autograd accepts;
* `running`: one process, several ranks, and the comparison.

A failing program is replayed with ``python -m tests.dist.programs '<text>'``.
"""
