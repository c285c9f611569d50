"""``smp verify``: does a script compute in other layouts what it computes in one process?"""

from smp.commands.verify.command import add_parser as add_parser
