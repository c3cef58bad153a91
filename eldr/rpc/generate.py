"""Makes `eldr/v1` from `protos/eldr/v1`; with --check, only says whether that would change anything.

Run from a checkout: `python -m eldr.rpc.generate`.
"""

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def generate(out: Path) -> list[Path]:
    """Writes the generated files under `out`; returns them, relative to `out`. Needs grpcio-tools."""
    protos = sorted((ROOT / "protos").glob("eldr/v1/*.proto"))
    if not protos:
        raise SystemExit(f"no .proto files under {ROOT / 'protos'}: run from a checkout")
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"),
        *(f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"),
        *map(str, protos),
    ]
    subprocess.run(command, check=True)
    made = sorted(path.relative_to(out) for path in (out / "eldr/v1").iterdir() if "_pb2" in path.name)
    # A file without services gets an empty stub.
    for path in made:
        if path.name.endswith("_pb2_grpc.py") and "class " not in (out / path).read_text():
            (out / path).unlink()
    return [path for path in made if (out / path).exists()]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where something would change"
    )
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        made = generate(out)
        present = {path.relative_to(ROOT) for path in (ROOT / "eldr/v1").iterdir() if "_pb2" in path.name}
        stale = [
            path
            for path in sorted({*made, *present})
            if path not in made
            or path not in present
            or not filecmp.cmp(out / path, ROOT / path, shallow=False)
        ]
        if check:
            for path in stale:
                print(f"{path} differs from protos/: run `python -m eldr.rpc.generate`", file=sys.stderr)
            sys.exit(1 if stale else 0)
        for path in stale:
            target = ROOT / path
            if path in made:
                target.write_bytes((out / path).read_bytes())
            else:
                target.unlink()
            print(path)


if __name__ == "__main__":
    main()
