"""The command `eldr`: one verb per file."""
