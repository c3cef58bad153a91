"""Refusals of the router, each with one gRPC status code in `service`."""


class NoWorkerError(Exception):
    """No worker can take the request now; the message says why, per worker."""


class UnknownModelError(Exception):
    """The query names a model that the fleet does not serve."""


class AddressNotAllowedError(ValueError):
    """A worker names an address outside the allow-list."""


class RequestError(ValueError):
    """A field of a request that is missing or out of range; the message names it."""
