"""Options of TLS and tokens, and what is made of them; docs/security.md says what they protect."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from eldr.rpc.calling import Caller
from eldr.rpc.security import Tls, TlsError, TlsFiles
from eldr.rpc.tokens import Role, TokenError, TokenFile, TokenTable

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(dir_okay=False, path_type=Path)
META = "eldr.caller."
"""Beginning of the keys under which a context keeps the options of `caller_options`."""


def tls_options(function: F) -> F:
    """The listener's own files: `tls_cert`, `tls_key`, `tls_ca`, `tls_require_client_cert`."""
    for flag, text in (
        ("--tls-ca", "Authorities (PEM) that sign the other side's certificates."),
        ("--tls-key", "Private key (PEM) of --tls-cert."),
        ("--tls-cert", "Serve over TLS with this certificate chain (PEM)."),
    ):
        function = click.option(flag, type=FILE, metavar="FILE", help=text)(function)
    return click.option(
        "--tls-require-client-cert", is_flag=True, help="Refuse clients without a certificate of --tls-ca."
    )(function)


def listener_tls(cert: Path | None, key: Path | None, ca: Path | None, require: bool) -> Tls | None:
    """What `tls_options` ask for; None for plaintext. Raises UsageError that names option or file."""
    if cert is None and key is None and ca is None and not require:
        return None
    if cert is None:
        raise click.UsageError("--tls-ca, --tls-key and --tls-require-client-cert need --tls-cert")
    return _tls(cert, key, ca, require)


def role_files_option(function: F) -> F:
    """`--token-file ROLE=FILE`, repeatable, as the parameter `token_files`."""
    return click.option(
        "--token-file",
        "token_files",
        multiple=True,
        metavar="ROLE=FILE",
        callback=_role_files,
        help=f"Tokens of a role ({', '.join(Role)}), one a line; repeat it. Without any, everybody is let in.",
    )(function)


def _role_files(_ctx: click.Context, _param: click.Parameter, pairs: Sequence[str]) -> Mapping[Role, Path]:
    found: dict[Role, Path] = {}
    for pair in pairs:
        role, equals, path = pair.partition("=")
        if not equals or not path or role not in set(Role) or Role(role) in found:
            raise click.BadParameter(
                f"must be ROLE=FILE with a role of {', '.join(Role)}, each at most once, got {pair!r}"
            )
        found[Role(role)] = Path(path)
    return found


def token_table(files: Mapping[Role, Path]) -> TokenTable | None:
    """The tokens by role; None where there are no files. Raises UsageError that names the file."""
    try:
        return TokenTable({role: TokenFile(path) for role, path in files.items()}) if files else None
    except TokenError as error:
        raise click.UsageError(f"--token-file: {error}") from error


def token_file_of(path: Path | None, flag: str) -> TokenFile | None:
    """A file of tokens that are accepted. Raises UsageError that names flag and file."""
    try:
        return None if path is None else TokenFile(path)
    except TokenError as error:
        raise click.UsageError(f"{flag}: {error}") from error


def shown_token(path: Path | None, flag: str) -> TokenFile | None:
    """A file whose first token is shown. Raises UsageError that names flag and file."""
    try:
        return None if path is None else TokenFile(path, shows=True)
    except TokenError as error:
        raise click.UsageError(f"{flag}: {error}") from error


def caller_options(function: F) -> F:
    """`--tls-ca`, `--tls-cert`, `--tls-key` and `--token-file` of a verb that calls a router; see `caller`."""
    for name, text in (
        ("token_file", "File whose first token is shown to the router."),
        ("tls_key", "Private key (PEM) of --tls-cert."),
        ("tls_cert", "Certificate (PEM) to show, where the router asks for one."),
        ("tls_ca", "Call over TLS; authorities (PEM) that sign the router's certificate."),
    ):
        function = click.option(
            "--" + name.replace("_", "-"),
            name,
            type=FILE,
            metavar="FILE",
            envvar=f"ELDR_{name.upper()}",
            help=text,
            expose_value=False,
            callback=_keep,
        )(function)
    return function


def _keep(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    if value is not None:
        ctx.meta[f"{META}{param.name}"] = value


def caller() -> Caller:
    """How the verb that runs shall call its router, by `caller_options`. Raises UsageError."""
    meta = click.get_current_context().meta
    given = {name: meta.get(f"{META}{name}") for name in ("tls_ca", "tls_cert", "tls_key", "token_file")}
    return make_caller(**given)


def make_caller(
    tls_ca: Path | None, tls_cert: Path | None, tls_key: Path | None, token_file: Path | None
) -> Caller:
    """A caller over TLS where a file of it is given. Raises UsageError that names the file."""
    secure = tls_ca is not None or tls_cert is not None or tls_key is not None
    tls = _tls(tls_cert, tls_key, tls_ca, False) if secure else None
    return Caller(tls, shown_token(token_file, "--token-file"))


def _tls(cert: Path | None, key: Path | None, ca: Path | None, require: bool) -> Tls:
    try:
        return Tls(TlsFiles(cert, key, ca, require))
    except TlsError as error:
        raise click.UsageError(str(error)) from error
