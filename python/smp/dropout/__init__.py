"""Dropout that is the same in every layout: `layout_independent_dropout`."""
