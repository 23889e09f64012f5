"""The version of this release, which anything in the package may read."""

__version__ = "0.1.0"
"""The version of the package, as text."""
