"""Names that only scripts of the v1 interface use."""
