"""`python -m halfstep` is `halfstep`."""

from halfstep.cli.main import main

if __name__ == "__main__":
    main()
