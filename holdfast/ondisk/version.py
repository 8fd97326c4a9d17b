"""The version of this package; `pyproject.toml` and every manifest take it from here. Nothing else lives here."""

__version__ = "0.1.0"
