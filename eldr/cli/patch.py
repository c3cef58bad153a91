"""`eldr patch`: apply, check or revert the vLLM patches."""

import json
from pathlib import Path

import click

from eldr import patching
from eldr.cli.main import effective

ACTIONS = {"apply": patching.apply, "status": patching.status, "revert": patching.revert}

ADVICE = {
    patching.TreeState.APPLIED: "every patch is applied",
    patching.TreeState.NOT_APPLIED: "vLLM is as upstream made it; `eldr patch apply` applies the series",
    patching.TreeState.PARTIAL: "half-applied, or patched by another eldr: "
    "`eldr patch apply` completes it, `eldr patch revert` undoes it; both are safe",
    patching.TreeState.FOREIGN: "nothing is written until the files marked foreign are upstream's again: "
    "undo the change, or reinstall vLLM",
}


@click.command()
@click.argument("action", type=click.Choice(list(ACTIONS)))
@click.option(
    "--tree",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="vLLM source tree or site-packages folder. Default: the vLLM of this interpreter's environment.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, action: str, tree: Path | None, as_json: bool) -> None:
    """Apply, check or revert the vLLM patches.

    \b
    apply   applies the series; a second time changes nothing
    status  says what the tree holds; exit code 0 only where every patch is applied
    revert  brings back upstream's files, to the byte

    Any version of vLLM but the pinned one is refused, and so is a hunk that does not match exactly at its
    line. When anything fails, the tree stays as it was. Restart running engines afterwards.
    """
    if not as_json:
        settings = ", ".join(f"{name}={value}" for name, value in effective(ctx).items())
        click.echo(f"settings: {settings}", err=True)
    try:
        series = patching.bundled_series()
        found = patching.find_installed() if tree is None else patching.open_tree(tree)
        report = ACTIONS[action](found, series)
    except patching.PatchingError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_as_json(action, found, series, report), indent=2))
    else:
        _print(action, found, series, report)
    ctx.exit(0 if action != "status" or report.state is patching.TreeState.APPLIED else 1)


def _print(action: str, tree: patching.VllmTree, series: patching.Series, report: patching.Report) -> None:
    click.echo(f"vLLM {tree.version or series.upstream.version} in {tree.root}: {report.state}")
    for patch in series.patches:
        click.echo(f"  {patch.name}: {patch.subject}")
    for file in report.files:
        click.echo(f"  {file.state:<9} {file.path}" + (f": {file.detail}" if file.detail else ""))
    if action == "status":
        click.echo(ADVICE[report.state])
    elif report.changed:
        click.echo(f"changed: {', '.join(report.changed)}")
    else:
        click.echo("nothing to do: " + ("already applied" if action == "apply" else "not applied"))


def _as_json(
    action: str, tree: patching.VllmTree, series: patching.Series, report: patching.Report
) -> dict[str, object]:
    return {
        "action": action,
        "tree": str(tree.root),
        "vllm_version": tree.version,
        "patches_for": series.upstream.version,
        "state": str(report.state),
        "patches": [{"name": patch.name, "subject": patch.subject} for patch in series.patches],
        "files": {file.path: {"state": str(file.state), "detail": file.detail} for file in report.files},
        "changed": list(report.changed),
    }
