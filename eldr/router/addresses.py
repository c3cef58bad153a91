"""Which addresses a worker may name: the router dials its gRPC address, gateways send prompts to its HTTP one."""

import fnmatch
import ipaddress
import re
from urllib.parse import urlsplit

from eldr.router.errors import AddressNotAllowedError
from eldr.rpc.worker_info import WorkerInfo

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_GLOB = re.compile(r"[A-Za-z0-9_.*?-]+")


class AllowedAddresses:
    """An address passes where its host matches a pattern: a network (10.0.0.0/8, a single IP) or a glob of host names.

    A glob is compared with the name as it is written; no name is looked up, so a network never matches a name and a
    glob never an IP address. Without patterns every address passes. Raises ValueError on a malformed pattern.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self._networks: list[Network] = []
        self._globs: list[str] = []
        for pattern in patterns:
            try:
                self._networks.append(ipaddress.ip_network(pattern))
            except ValueError as error:
                # Digits, dots and colons alone were meant as an IP address.
                if "/" in pattern or not _GLOB.fullmatch(pattern) or not re.search("[A-Za-z*?]", pattern):
                    raise ValueError(
                        f"allow_workers must be networks such as 10.0.0.0/8 or globs of host names such as "
                        f"*.fleet.internal, got {pattern!r}: {error}"
                    ) from error
                self._globs.append(pattern.lower())

    def require(self, info: WorkerInfo) -> None:
        """Raises AddressNotAllowedError that names the field and the host."""
        if not (self._networks or self._globs):
            return
        hosts = {
            "http_url": urlsplit(info.http_url).hostname or "",
            "grpc_address": info.grpc_address.rpartition(":")[0].strip("[]"),
        }
        for field, host in hosts.items():
            if not self._allows(host.lower()):
                raise AddressNotAllowedError(
                    f"worker {info.worker_id}: the host {host!r} of its {field} is not in the router's allow-list"
                )

    def _allows(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return any(fnmatch.fnmatchcase(host, glob) for glob in self._globs)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)
