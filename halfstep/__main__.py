"""`python -m halfstep` is `halfstep`."""

import sys

if __name__ == "__main__":
    try:
        from halfstep.cli.main import main

        main()
    except KeyboardInterrupt:  # while the first module was imported, or after the last word
        sys.stderr.write("interrupted\n")
        sys.exit(130)
