"""What can go wrong with a fleet of local processes."""


class ClusterError(Exception):
    """A local process could not be started, died or never became ready; the message shows its log's end."""


class ConfigError(ValueError):
    """A setting out of range; the message names field, value and range."""
