"""`python -m specdec_cli` is the command `specdec`."""

from specdec_cli.cli.main import run

if __name__ == "__main__":
    raise SystemExit(run())
