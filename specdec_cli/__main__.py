"""The command `specdec`, which is also `python -m specdec_cli`. It imports nothing before it can be interrupted."""


def main() -> int:
    """Run the process's command line and return its exit code, also if it is interrupted while modules are imported."""
    try:
        from specdec_cli.cli.main import run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
