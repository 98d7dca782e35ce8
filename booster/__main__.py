"""`python -m booster` is the command `booster`."""

from booster.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
