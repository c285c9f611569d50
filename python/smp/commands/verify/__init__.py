"""``smp verify``: compares results of a script in other layouts with those in one process."""

from smp.commands.verify.command import add_parser as add_parser
