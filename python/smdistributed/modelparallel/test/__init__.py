"""The import path of helpers that old scripts take from the library's own tests."""
