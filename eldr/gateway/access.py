"""Who may use the gateway: API keys from a file, and what of them goes on to the workers."""

from collections.abc import Mapping

from aiohttp import web

from eldr.gateway.errors import GatewayError
from eldr.rpc.tokens import TokenFile, bearer

OPEN_PATHS = frozenset({"/health", "/version"})
"""Answered without a key: probes have none."""


class ApiKeys:
    """Checks the key of each request, and chooses the one that the engines see.

    Without `accepted` everybody is let in and a client's Authorization header goes on to the engines, which may check
    it. With it the client's key stays here. `engine` is what the engines are shown instead (`vllm serve --api-key`).
    """

    def __init__(self, accepted: TokenFile | None = None, engine: TokenFile | None = None) -> None:
        self._accepted = accepted
        self._engine = engine

    @property
    def checked(self) -> bool:
        """Whether a key is asked for."""
        return self._accepted is not None

    def require(self, request: web.Request) -> None:
        """Raises GatewayError 401, the same for a missing key and for a wrong one."""
        if self._accepted is None or request.path in OPEN_PATHS:
            return
        key = bearer(request.headers.get("Authorization"))
        if key is None or not self._accepted.accepts(key):
            raise GatewayError(401, "a valid API key is needed, as Authorization: Bearer <key>")

    def for_engines(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The forwarded headers with the engines' own key, or without any."""
        kept = dict(headers)
        if self._accepted is not None or self._engine is not None:
            kept.pop("Authorization", None)
        if self._engine is not None:
            kept["Authorization"] = f"Bearer {self._engine.shown()}"
        return kept
