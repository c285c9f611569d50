"""Decoders of files, given inputs that are nearly right."""
