"""Interfaces for other libraries. Each module imports its library; `smp` imports none of them."""
