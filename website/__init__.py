"""The site of the documentation: `make site` (docs/design/site.md)."""
