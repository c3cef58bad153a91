"""What can go wrong; every message names the file and what to do."""


class PatchingError(Exception):
    """A tree or a series that cannot be worked on. Nothing was changed."""
